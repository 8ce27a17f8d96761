"""A prompt in the closed loop: prefilled, compressed under a policy, then continued, scored or generated from.

A prompt is divided into what the policy compresses (its context) and what is fed afterwards (at least its last
token, whose logits predict the continuation). Nothing here knows the harness.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from kvassay.cache.ops import group_specs
from kvassay.cache.paged import PagedCache
from kvassay.errors import BudgetError, ExperimentError
from kvassay.experiment.calibrate import calibration_sample
from kvassay.experiment.plan import options_for
from kvassay.experiment.schema import CalibrationTable
from kvassay.policy.base import Memory
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Evidence, When
from kvassay.policy.registry import make
from kvassay.record.load import LoadedModel
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.replay.arms import Arm
from kvassay.replay.bytes import held
from kvassay.replay.calibration import fit_offline, fitting_once
from kvassay.replay.closed import Replay
from kvassay.replay.engine import Engine
from kvassay.replay.feeding import feed
from kvassay.replay.lane import Lane, scope_of
from kvassay.replay.protocol import Protocol
from kvassay.trace.reader import Trace
from kvassay.workload.sample import Branch, Sample

Short = Literal["refuse", "dense"]
Stop = Callable[[Sequence[int]], bool]
"""Whether a reply ends with the tokens so far."""


class Prompt(NamedTuple):
    """Token ids of a prompt."""

    context: tuple[int, ...]
    """What the policy compresses; may be empty for a prompt of one token."""
    rest: tuple[int, ...]
    """What is fed after compressing, at least one token."""


@dataclass
class Tally:
    """What became of the prompts."""

    prompts: int = 0
    dense_prompts: int = 0
    """Too short for the budget, and so not compressed."""
    fractions: float = 0.0
    """Bytes held after compressing / dense's, summed over compressed prompts."""

    @property
    def retained_fraction(self) -> float | None:
        """Mean over the prompts compressed; lower is better."""
        done = self.prompts - self.dense_prompts
        return self.fractions / done if done else None


@dataclass(frozen=True)
class Asked:
    """A compressed context, ready to be continued as often as one likes."""

    engine: Engine
    fork: Callable[[], Lane]
    rest: tuple[int, ...]

    def score(self, continuation: Sequence[int]) -> tuple[float, bool]:
        """Log-likelihood of the continuation (nats), and whether greedy decoding would have said it."""
        lane = self.fork()
        fed = [*self.rest, *continuation[:-1]]
        logits = feed(self.engine, [lane], [fed], last=len(continuation))[0].double()
        lane.free()
        target = torch.tensor(list(continuation))
        found = torch.log_softmax(logits, -1).gather(1, target[:, None]).sum()
        return float(found), bool((logits.argmax(-1) == target).all())

    def generate(self, limit: int, stop: Stop) -> list[int]:
        """Greedy reply of at most `limit` tokens, up to the token with which `stop` ends it."""
        lane = self.fork()
        ids: list[int] = []
        fed: Sequence[int] = self.rest
        while len(ids) < limit and not (ids and stop(ids)):
            logits = feed(self.engine, [lane], [fed], last=1)[0]
            ids.append(int(logits[-1].argmax()))
            fed = ids[-1:]
        lane.free()
        return ids


class Prompts:
    """Prompts of one model under one arm, one at a time. Use as a context manager: it keeps files meanwhile."""

    def __init__(self, loaded: LoadedModel, arm: Arm, *, seed: int = 0, short: Short = "refuse") -> None:
        """`short`: what becomes of a prompt that the budget leaves nothing of beside what is protected.

        Raises `ExperimentError` for a policy that must know what comes after the prompt.
        """
        if Evidence.FUTURE_QUERIES in arm.policy.card.evidence:
            raise ExperimentError(
                f"policy '{arm.policy.card.name}' needs the queries of what comes after the prompt, which a harness "
                "does not give; use it with `kvassay run`"
            )
        self.loaded, self.arm, self.short = loaded, arm, short
        self.protocol = Protocol(seed=seed)
        self.options = options_for([arm.policy], RecordOptions())
        self.tally = Tally()
        self._files = ExitStack()
        self._folder = Path(self._files.enter_context(tempfile.TemporaryDirectory(prefix="kvassay-")))
        self._files.enter_context(fitting_once())
        self._calibration = self._calibrate()

    def close(self) -> None:
        """Remove its files."""
        self._files.close()

    def _calibrate(self) -> Trace | None:
        if When.OFFLINE not in self.arm.policy.card.when:
            return None
        sample = calibration_sample(self.loaded, CalibrationTable())
        return record_sample(self.loaded, sample, self._folder / "calibration", self.options)

    @contextmanager
    def asked(self, prompt: Prompt, room: int) -> Iterator[Asked]:
        """Compress the prompt's context; `room`: most tokens that will follow the prompt in one continuation.

        Raises `BudgetError` for a prompt that is too short for the budget, unless such are to run dense.
        """
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            asked = None if self.arm.policy.card.name == "dense" else self._try(prompt, room, Path(folder) / "trace")
            self.tally.prompts += 1
            self.tally.dense_prompts += asked is None
            yield asked or self._plain(prompt, room)

    def _try(self, prompt: Prompt, room: int, folder: Path) -> Asked | None:
        """The prompt compressed; None, or `BudgetError`, if it is too short for that."""
        try:
            if not prompt.context:
                raise BudgetError(f"a prompt of {len(prompt.rest)} tokens leaves none to compress before the last")
            # Before anything is recorded; a policy with a rule of its own refuses when it decides.
            Allowance.resolve(self.arm.budget, len(prompt.context), self.arm.protection)
            return self._compressed(record_sample(self.loaded, _sample(prompt), folder, self.options), prompt, room)
        except BudgetError as error:
            if self.short == "dense":
                return None
            raise BudgetError(f"{error}; or let such prompts run dense, which is counted (short=dense)") from None

    def _compressed(self, trace: Trace, prompt: Prompt, room: int) -> Asked:
        artefacts = fit_offline([self.arm.policy], trace, self._calibration, self.loaded.model)
        protocol = replace(self.protocol, free_tokens=room + len(prompt.rest))
        replay = Replay(self.loaded, trace, [self.arm], protocol, artefacts, forks=3)
        dense = replay.compressed(Arm(make("dense"), None, self.arm.protection))
        whole = held(dense.lane).total
        dense.lane.free()
        done = replay.compressed(self.arm)
        self.tally.fractions += held(done.lane).total / whole
        return Asked(replay.engine, lambda: replay.forks([done])[0], prompt.rest)

    def _plain(self, prompt: Prompt, room: int) -> Asked:
        """The prompt under dense attention, from the first token on."""
        layout, tokens = self.loaded.layout, (*prompt.context, *prompt.rest)
        groups = group_specs(layout, self.protocol.block_size)
        blocks = 1 + sum(2 * (-(-(len(tokens) + room) // group.block_size) + 2) for group in groups)
        cache = PagedCache(layout, groups, blocks, device=self.loaded.device)
        engine, arm = Engine(self.loaded.model, cache), Arm(make("dense"), None, self.arm.protection)
        lane = Lane(
            arm,
            cache.create([])[0],
            cache,
            Allowance.resolve(None, len(tokens), arm.protection),
            Memory(rng=torch.Generator().manual_seed(self.protocol.seed)),
            scope_of(layout, arm.policy),
        )
        size = self.options.prefill_chunk
        for first in range(0, len(tokens) - 1, size):
            engine.forward([lane], [tokens[first : min(first + size, len(tokens) - 1)]], last=0)
        return Asked(engine, lane.fork, tokens[-1:])


def divide(ids: Sequence[int], context: int, room: int, longest: int, opening: Sequence[int]) -> tuple[Prompt, bool]:
    """A prompt whose first `context` tokens are compressed, cut at its left to leave `room`; and whether it was cut.

    The special tokens that open every text stay: a model that was trained with them fails without.

    Raises `ExperimentError` if what is fed after compressing does not fit `longest` tokens.
    """
    head, rest = tuple(ids[:context]), tuple(ids[context:])
    over = len(ids) + room - longest
    if over <= 0:
        return Prompt(head, rest), False
    kept = tuple(opening) if head[: len(opening)] == tuple(opening) else ()
    if over > len(head) - len(kept):
        raise ExperimentError(
            f"{len(rest)} tokens after the context and {room} of the continuation do not fit {longest} tokens"
        )
    return Prompt((*kept, *head[len(kept) + over :]), rest), True


def _sample(prompt: Prompt) -> Sample:
    """The prompt as the recorder takes one. It records no context without an answer: this one's is never read."""
    answer = prompt.rest[-1:]
    branch = Branch(prompt.rest, answer, "", "", (0,), 1.0)
    return Sample("lm-eval", 0, 0, prompt.context, (branch,), query_aware=len(prompt.rest) == 1)
