"""Speculative acceptance: what a draft is worth where arms verify it, or where an arm's compressed cache makes it.

    compressed   each arm's cache drafts, dense verifies: self-speculation as in TriForce (arXiv 2404.11912) and
                 MagicDec (arXiv 2408.11049)
    ngram        prompt lookup drafts; each arm, dense among them, verifies
    a model      a second model with the same tokenizer drafts, uncompressed; each arm verifies

Every drafter is measured in two modes, which are never averaged: teacher-forced, a draft from each recorded
position, so that all arms are compared at the same positions (acceptance falls along a text whatever the policy);
and free-running, the speculative decoding that an engine would do. All verification is greedy, and goes on past
an end-of-text token. A policy that acts at every step acts once per round, on what was accepted: teacher-forced
that is each recorded token, as in the closed loop, free-running it may be several at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from kvassay.measure.acceptance import COMPRESSED, AcceptanceResult, Mode, tally
from kvassay.record.load import LoadedModel
from kvassay.replay.arms import Arm
from kvassay.replay.calibration import fit_offline
from kvassay.replay.closed import Compressed, Progress, Replay, check_replay, dense_row
from kvassay.replay.draft_model import DraftModel
from kvassay.replay.drafting import Drafter, Lookup, Pair, Speculation, forked, free_running, teacher_forced
from kvassay.replay.feeding import feed
from kvassay.replay.lane import Lane
from kvassay.replay.protocol import Protocol
from kvassay.trace.reader import Branch, Trace

FORKS = 4
"""Lanes of an arm at the same time: its context, one that stands at the question's end, a drafter, a target."""


def replay_speculation(
    loaded: LoadedModel,
    trace: Trace,
    arms: Sequence[Arm],
    protocol: Protocol,
    how: Speculation,
    drafters: Mapping[str, LoadedModel | None],
    progress: Progress = lambda message: None,
    *,
    calibration: Trace | None = None,
) -> list[AcceptanceResult]:
    """Measure acceptance on every question of a trace: per question, drafter and arm, `k` teacher-forced rows
    (k = 1..how.k, from the same rounds) and one free-running row.

    drafters: by name; the loaded model of a draft model, None for `compressed` and `ngram`
    Raises what `replay_trace` raises, and `ExperimentError` for a draft model of another tokenizer.
    """
    protocol = replace(protocol, free_tokens=how.k + 3)  # the farthest a draft can reach beyond the recorded tokens
    check_replay(loaded, trace, arms, protocol)
    artefacts = fit_offline([arm.policy for arm in arms], trace, calibration, loaded.model)
    replay = Replay(loaded, trace, arms, protocol, artefacts, FORKS)
    models = {
        name: DraftModel(model, loaded, trace, arms[dense_row(arms)], protocol, len(arms))
        for name, model in drafters.items()
        if model is not None
    }
    progress(f"compress {len(arms)} arms")
    compressed = [replay.compressed(arm) for arm in arms]
    rows: list[AcceptanceResult] = []
    for index, branch in enumerate(trace.branches):
        asked = _Question(replay, compressed, index, branch, how)
        for name in drafters:
            progress(f"question {index + 1}/{len(trace.branches)}, drafts by {name}")
            rows += asked.measured(name, models.get(name))
        asked.free()
    return rows


class _Question:
    """One question asked of all arms: their lanes stand before its last token, for all drafters to start from."""

    def __init__(
        self, replay: Replay, compressed: Sequence[Compressed], index: int, branch: Branch, how: Speculation
    ) -> None:
        self.replay, self.index, self.how = replay, index, how
        ids = branch.token_ids.tolist()
        self.question, self.answer = ids[: branch.question_tokens], ids[branch.question_tokens :]
        self.lanes = replay.forks(compressed)
        if len(self.question) > 1:
            feed(replay.engine, self.lanes, [self.question[:-1]] * len(self.lanes), last=0)
        self.dense = self.lanes[dense_row([lane.arm for lane in self.lanes])]

    def measured(self, name: str, model: DraftModel | None) -> list[AcceptanceResult]:
        """All rows of one drafter."""
        how, rows = self.how, []
        pairs = self._pairs(name, model)
        teacher_forced(pairs, how.k, self.answer[: how.tokens])
        for lane, pair in zip(self.lanes, pairs, strict=True):
            rows += [self._row(lane, pair, "teacher_forced", name, k) for k in range(1, how.k + 1)]
            pair.free()
        pairs = self._pairs(name, model)
        free_running(pairs, how.k, min(how.tokens, len(self.answer) + 2))
        for lane, pair in zip(self.lanes, pairs, strict=True):
            rows.append(self._row(lane, pair, "free_running", name, how.k))
            pair.free()
        return rows

    def _pairs(self, name: str, model: DraftModel | None) -> list[Pair]:
        """A drafter and a target for each arm, at the question's end."""
        engine, last, count = self.replay.engine, self.question[-1], len(self.lanes)
        own = forked(engine, self.lanes, last)
        if name == COMPRESSED:
            return [Pair(*both) for both in zip(own, forked(engine, [self.dense] * count, last), strict=True)]
        drafters: Sequence[Drafter]
        if model is None:
            text = [*self.replay.trace.prefix.token_ids.tolist(), *self.question]
            drafters = [Lookup(list(text), self.how.ngram_min, self.how.ngram_max) for _ in own]
        else:
            drafters = model.drafters(self.question, count)
        return [Pair(*both) for both in zip(drafters, own, strict=True)]

    def _row(self, lane: Lane, pair: Pair, mode: Mode, name: str, k: int) -> AcceptanceResult:
        trace = self.replay.trace
        return AcceptanceResult(
            trace=trace.path.name,
            workload=trace.header.recipe.name,
            branch=self.index,
            arm=lane.arm.label,
            mode=mode,
            drafter=name,
            target=pair.target.lane.arm.label,
            context_tokens=trace.prefix.tokens,
            **asdict(tally(pair.rounds, k)),
        )

    def free(self) -> None:
        """Give all lanes back."""
        for lane in self.lanes:
            lane.free()
