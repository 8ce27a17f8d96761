"""How much DynaCalKV's ranks and groups depend on the calibration text, and what it and ReCalKV lose at equal bytes.

    python benchmarks/lowrank_calibration.py [--model smollm2-135m] [--length 8192] [--rank 0.5] [--context 0]
        [--ask needle_multikey kv_short prose]

One calibration text is recorded; fits on the first 1, 4, 16 pieces of it, on short pieces, on 4 pieces and one of
sentences with numbers (A+), and on 16 pieces of another text are compared with the fit on 16 pieces of 512 tokens.
Moved: half the sum of differences of ranks over the pool, 0 is the same split, 1 another one altogether. Groups: layers
whose key heads are grouped otherwise. Values: share of the value ranks in the pool.

With --context texts of that length (of the workloads --ask, six questions each) are replayed as well, under every fit
(what its sensitivity comes to) and, the first of them, under both groupings, at equal cached bytes (ceiling=elements
against ReCalKV's uniform groups, all of one rank) and the paper's way (equal parameters of the thin projections): mean
KL to dense on answers, in nats, and bytes held.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from kvassay.experiment.calibrate import calibration_sample
from kvassay.experiment.plan import options_for
from kvassay.experiment.schema import CalibrationTable
from kvassay.policy.base import Artefact, Policy
from kvassay.policy.budget import Protection
from kvassay.policy.card import Prefill
from kvassay.policy.registry import make, parse
from kvassay.policy.weights import CalibrationPass
from kvassay.record.load import LoadedModel, load
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.replay.arms import Arm
from kvassay.replay.calibration import TraceCalibration
from kvassay.replay.closed import Replay, replay_trace
from kvassay.replay.projections import calibration_pass
from kvassay.replay.protocol import Protocol
from kvassay.trace.reader import Trace
from kvassay.workload.registry import build

FITS = (("A", 16, 512), ("A", 4, 512), ("A", 1, 512), ("A", 16, 128), ("A", 64, 128), ("A+", 4, 512), ("B", 16, 512))
"""Text, pieces and tokens each; A+ is A with a piece of numbers."""
THINGS = ["river", "stone", "table", "window", "garden", "bottle", "candle", "ladder", "mirror", "basket"]


class WithNumbers(TraceCalibration):
    """A text without a digit, and one piece of sentences that have some."""

    def __init__(self, trace: Trace, policy: Policy, loaded: LoadedModel) -> None:
        super().__init__(trace, policy, loaded.model)
        self.tokenizer = loaded.tokenizer

    def passes(self, samples: int, tokens: int) -> Iterator[CalibrationPass]:
        """The text's, and one more."""
        yield from super().passes(samples, tokens)
        rng = random.Random(99)
        told = (f"The number of the {rng.choice(THINGS)} is {rng.randrange(10_000, 100_000)}." for _ in range(tokens))
        ids = torch.tensor(self.tokenizer.encode(" ".join(told))[:tokens])
        yield calibration_pass(self.model, ids, self.trace.layout.layers, gradients=True)


def ranks(artefact: Artefact) -> dict[str, int]:
    """Rank of every key and value matrix, a layer's key groups together."""
    found: dict[str, int] = {}
    for name, tensor in artefact.tensors.items():
        layer, part, *_ = name.split(".")
        if part in ("key", "value"):
            found[f"{layer} {part}"] = found.get(f"{layer} {part}", 0) + tensor.shape[1]
    return found


def groups(artefact: Artefact) -> dict[str, list[int]]:
    """Group of every key head, by layer."""
    return {n.split(".")[0]: t.tolist() for n, t in artefact.tensors.items() if n.endswith(".groups")}


def moved(one: Mapping[str, int], other: Mapping[str, int]) -> float:
    """Share of the pool that lies elsewhere."""
    return sum(abs(one[name] - other[name]) for name in one) / (sum(one.values()) + sum(other.values()))


def sensitivity(loaded: LoadedModel, texts: Mapping[str, Trace], rank: float, tests: Sequence[Trace]) -> Table:
    """One row per fit, against the first; with test texts what it loses there, prefilled by itself."""
    asked = [f"KL, {test.header.recipe.name}" for test in tests]
    table = Table("text", "pieces", "tokens each", "fit, s", "moved", "groups", "values", *asked)
    first: Artefact | None = None
    for text, samples, tokens in FITS:
        policy, trace = make("dynacalkv", rank=rank, samples=samples, tokens=tokens, group=1), texts[text[0]]
        start = time.perf_counter()
        more = WithNumbers(trace, policy, loaded) if text == "A+" else TraceCalibration(trace, policy, loaded.model)
        found = policy.fit(more)
        seconds = time.perf_counter() - start
        kl = [f"{lost(loaded, test, policy, found):.3f}" for test in tests]
        first = first or found
        mine, theirs = ranks(found), ranks(first)
        values = sum(r for name, r in mine.items() if name.endswith("value")) / sum(mine.values())
        other = sum(group != groups(first)[layer] for layer, group in groups(found).items())
        had = max(1, min(samples, trace.prefix.tokens // tokens))
        cells = (f"{seconds:.0f}", f"{moved(mine, theirs):.3f}", f"{other}/{len(groups(found))}", f"{values:.2f}")
        row = (text, str(had), str(tokens), *cells, *kl)
        table.add_row(*row)
        print(*row, sep=" | ", file=sys.stderr)
    return table


def lost(loaded: LoadedModel, test: Trace, policy: Policy, artefact: Artefact) -> float:
    """Mean KL to dense on the answers of a text whose prefill the method takes part in."""
    plain = Protection(0, 0)
    arms = [Arm(make("dense"), None, plain), Arm(policy, None, plain, prefill=Prefill.OWN)]
    replay = Replay(loaded, test, arms, Protocol(free_tokens=0), {policy.label: artefact})
    lanes = [replay.compressed(arm) for arm in arms]
    rows = [row for number, branch in enumerate(test.branches) for row in replay.ask(number, branch, lanes)]
    mine = [row.kl for row in rows if row.arm == arms[1].label]
    return sum(mine) / len(mine)


def recorded(loaded: LoadedModel, folder: Path, policies: Sequence[Policy], workload: str, context: int) -> Trace:
    """A test text, with the evidence that all policies need."""
    sample = build(workload, loaded.tokenizer, context, seed=1, questions=6)
    return record_sample(loaded, sample, folder / workload, options_for(policies, RecordOptions()))


def compared(rank: float) -> list[Policy]:
    """Both groupings at one rank, and the plain baseline."""
    named = [f"{text}, rank={rank})" for text in ("recalkv(group=1", "dynacalkv(group=1", "dynacalkv(ceiling=elements")]
    named += [f"recalkv(rank={rank})", f"svd(rank={rank})"]
    return [parse(text) for text in named]


def replayed(loaded: LoadedModel, trace: Trace, calibration: Trace, policies: Sequence[Policy]) -> Table:
    """Forked, and prefilled by themselves."""
    plain = Protection(0, 0)
    arms = [Arm(make("dense"), None, plain), *(Arm(policy, None, plain) for policy in policies)]
    arms += [Arm(policy, None, plain, prefill=Prefill.OWN) for policy in policies]
    rows = replay_trace(loaded, trace, arms, Protocol(free_tokens=0), calibration=calibration)
    table = Table("arm", "KL to dense, nats", "held / dense, layers in scope")
    for arm in arms:
        mine = [row for row in rows if row.arm == arm.label]
        kl, held = (sum(getattr(r, name) for r in mine) / len(mine) for name in ("kl", "retained_fraction_scope"))
        table.add_row(arm.label, f"{kl:.4f}", f"{held:.3f}")
    return table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rank", type=float, default=0.5)
    parser.add_argument("--context", type=int, default=0)
    parser.add_argument("--ask", nargs="+", default=["needle_multikey", "kv_short", "prose"])
    given = parser.parse_args()
    loaded, console = load(given.model), Console()
    with tempfile.TemporaryDirectory() as folder:
        texts = {
            "AB"[seed]: record_sample(
                loaded,
                calibration_sample(loaded, CalibrationTable(length=given.length, seed=seed)),
                Path(folder) / f"text-{seed}",
                RecordOptions(),
            )
            for seed in (0, 1)
        }
        policies = compared(given.rank)
        asked = given.ask if given.context else []
        tests = [recorded(loaded, Path(folder), policies, workload, given.context) for workload in asked]
        console.print(sensitivity(loaded, texts, given.rank, tests))
        if tests:
            console.print(replayed(loaded, tests[0], texts["A"], policies))


if __name__ == "__main__":
    main()
