"""What changed between two runs: settings, what only one of them has, and paired differences where both have it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from kvassay.errors import ExperimentError, did_you_mean
from kvassay.experiment.differences import Change, changes
from kvassay.experiment.pairing import Pair, Questions, SetKey, pairs, rerecorded
from kvassay.experiment.results import Results
from kvassay.experiment.rows import WALL
from kvassay.measure.aggregate import FLIPPED, right
from kvassay.measure.latency import LatencyResult
from kvassay.measure.metrics import CARDS, QUALITY
from kvassay.measure.multiple import ALPHA, holm, two_sided_p
from kvassay.measure.resample import Estimate, Floats, Resampling
from kvassay.measure.result import NOT_GENERATED, RECLAIM_MODES, BranchResult, measured
from kvassay.measure.statistics import Flips, flips
from kvassay.measure.verdict import load_judgement

METRICS = ("top1", "task", "nll")
"""Compared unless others are asked for: each metric more makes every other one harder to show."""
AMOUNTS = ("retained_bytes", "retained_fraction", "read_bytes", "read_fraction", "selected_tokens", "policy_bytes")
Side = Literal["A", "B"]
_NAMES = ("trace", "context_sha256", "question_sha256")
_SAID = attrgetter(*(f.name for f in dataclasses.fields(BranchResult) if f.name not in (*WALL, *_NAMES)))


@dataclass(frozen=True)
class Only:
    """Something that one run has and the other has not."""

    kind: Literal["model", "trace set", "arm"]
    name: str
    run: Side


@dataclass(frozen=True)
class Contrast:
    """One quality metric, B minus A, paired by question."""

    metric: str
    before: float
    """A's mean over the shared questions."""
    after: float
    difference: Estimate
    """95% interval, clustered by context, not corrected for the number of comparisons."""
    p_value: float | None
    """Two-sided, of no difference; None where no test is possible (too few contexts)."""
    adjusted: float | None = None
    """Holm's, over all tests of this comparison."""
    significant: bool | None = None
    """Whether `adjusted` is below 0.05; None: not tested."""


@dataclass(frozen=True)
class Amount:
    """One number of an arm in both runs, a mean over the shared questions unless it is a time."""

    name: str
    unit: str
    how: Literal["measured", "modelled"]
    before: float
    after: float


@dataclass(frozen=True)
class PairedCell:
    """One arm on one trace set that both runs have."""

    model: str
    trace_set: str
    arm: str
    questions: int
    """Answered in both runs."""
    contexts: int
    unpaired: tuple[int, int]
    """Questions that only A, only B answered."""
    identical: bool
    """Every shared question has the same numbers and text to the last bit, wall times aside."""
    contrasts: tuple[Contrast, ...]
    flips: Mapping[str, Flips]
    """A's right answers that are wrong in B, and the other way round."""
    amounts: tuple[Amount, ...]
    times: tuple[Amount, ...]
    """Measured decode times, where both runs have them."""
    times_apart: bool | None
    """Whether the quartiles of the attention times of A and B do not overlap; None without times."""


@dataclass(frozen=True)
class Comparison:
    """Run B against run A."""

    a: str
    b: str
    changes: tuple[Change, ...]
    """Code, versions, machine and settings that differ."""
    only: tuple[Only, ...]
    cells: tuple[PairedCell, ...]
    comparisons: int
    """Tests that Holm's correction is over."""
    alpha: float
    verdicts: tuple[Change, ...]
    """Arms whose verdict changed, where both runs were judged."""
    notes: tuple[str, ...]
    """What keeps the comparison from meaning what it seems to."""


def compare(a: Results, b: Results, metrics: Sequence[str] = METRICS) -> Comparison:
    """Compare run `b` with run `a`: by trace set and arm label, paired by question.

    Raises `ExperimentError` for a metric that is none, or if the runs share no trace set or arm.
    """
    for name in metrics:
        if name not in QUALITY:
            raise ExperimentError(f"no quality metric is called '{name}'{did_you_mean(name, QUALITY)}")
    before, after = Questions.of(a), Questions.of(b)
    only = tuple(_only(before, after))
    wanted = tuple(dict.fromkeys(metrics))
    cells = [cell for where in before.rows if where in after.rows for cell in _cells(where, before, after, wanted)]
    if not cells:
        raise ExperimentError(f"{a.path} and {b.path} share no arm on any trace set: nothing can be compared")
    times = [_with_times(cell, a, b) for cell in cells]
    corrected, count = _corrected(times)
    return Comparison(
        a=str(a.path),
        b=str(b.path),
        changes=changes(a.manifest, b.manifest),
        only=only,
        cells=tuple(corrected),
        comparisons=count,
        alpha=round(ALPHA, 6),
        verdicts=_verdicts(a, b),
        notes=tuple(_notes(before, after, cells)),
    )


def _only(before: Questions, after: Questions) -> Iterator[Only]:
    """What one run lacks; an arm or a trace set is not named again where its model or trace set is lacking."""
    sides: tuple[tuple[Side, Questions, Questions], ...] = (("A", before, after), ("B", after, before))
    for side, mine, other in sides:
        models = {model for model, _ in other.rows}
        yield from (Only("model", m, side) for m in dict.fromkeys(m for m, _ in mine.rows) if m not in models)
        for (model, label), arms in mine.rows.items():
            theirs = other.rows.get((model, label))
            if theirs is not None:
                yield from (Only("arm", f"{model}, {label}: {arm}", side) for arm in arms if arm not in theirs)
            elif model in models:
                yield Only("trace set", f"{model}, {label}", side)


def _cells(where: SetKey, before: Questions, after: Questions, metrics: Sequence[str]) -> Iterator[PairedCell]:
    """The arms that both runs have on one trace set."""
    mine, theirs = before.rows[where], after.rows[where]
    shared = {arm: pairs(mine[arm], theirs[arm]) for arm in mine if arm in theirs}
    contrasts = _contrasts({arm: found for arm, found in shared.items() if found}, metrics)
    for arm, found in shared.items():
        yield PairedCell(
            model=where[0],
            trace_set=where[1],
            arm=arm,
            questions=len(found),
            contexts=len({pair.context for pair in found}),
            unpaired=(len(mine[arm]) - len(found), len(theirs[arm]) - len(found)),
            identical=bool(found) and all(map(_same, found)),
            contrasts=contrasts.get(arm, ()),
            flips={name: flips(*_rights(found, name)) for name in _measured(found, FLIPPED)} if found else {},
            amounts=tuple(_amounts(found)) if found else (),
            times=(),
            times_apart=None,
        )


def _contrasts(shared: Mapping[str, Sequence[Pair]], metrics: Sequence[str]) -> dict[str, tuple[Contrast, ...]]:
    """Contrasts by arm; arms with the same questions are resampled together."""
    alike: dict[tuple[Hashable, ...], list[str]] = {}
    for arm, found in shared.items():
        alike.setdefault(tuple(pair.context for pair in found), []).append(arm)
    contrasts: dict[str, tuple[Contrast, ...]] = {}
    for contexts, arms in alike.items():
        names = _measured([pair for arm in arms for pair in shared[arm]], metrics)
        if not names:
            continue
        values = np.stack([_values(shared[arm], names) for arm in arms])
        off = values[:, :, 1] - values[:, :, 0]  # [arms, questions, metrics]
        bounds = [CARDS[name].paired_bounds for name in names] * len(arms)
        columns = off.transpose(1, 0, 2).reshape(len(contexts), -1)
        estimates = iter(Resampling(contexts).estimates(columns, bounds))
        for arm, means in zip(arms, values.mean(axis=1).tolist(), strict=True):
            contrasts[arm] = tuple(
                Contrast(name, old, new, difference := next(estimates), two_sided_p(difference))
                for name, old, new in zip(names, *means, strict=True)
            )
    return contrasts


def _measured(shared: Sequence[Pair], names: Sequence[str]) -> tuple[str, ...]:
    """Those of the metrics that both runs have."""
    return measured(chain(*_sides(shared)), names)


def _values(shared: Sequence[Pair], metrics: Sequence[str]) -> Floats:
    """[questions, runs, metrics]."""
    rows = [[[getattr(row, name) for name in metrics] for row in (pair.before, pair.after)] for pair in shared]
    return np.array(rows, dtype=np.float64)


def _rights(shared: Sequence[Pair], name: str) -> tuple[list[bool], list[bool]]:
    return [right(pair.before, name) for pair in shared], [right(pair.after, name) for pair in shared]


def _amounts(shared: Sequence[Pair]) -> Iterator[Amount]:
    for name in AMOUNTS:
        card, get = CARDS[name], attrgetter(name)
        means = [math.fsum(map(get, side)) / len(shared) for side in _sides(shared)]
        yield Amount(name, card.unit, card.how, *means)
    peaks = [max(row.peak_bytes for row in side) for side in _sides(shared)]
    yield Amount("peak_bytes", CARDS["peak_bytes"].unit, "measured", *peaks)
    for mode in RECLAIM_MODES:
        freed = [[row.blocks_freed.get(mode) for row in side] for side in _sides(shared)]
        if not any(count is None for side in freed for count in side):
            means = [math.fsum(count or 0.0 for count in side) / len(shared) for side in freed]
            yield Amount(f"blocks_freed_{mode}", "blocks", "measured", *means)


def _sides(shared: Sequence[Pair]) -> tuple[list[Any], list[Any]]:
    return [pair.before for pair in shared], [pair.after for pair in shared]


def _same(pair: Pair) -> bool:
    """Whether two rows say the same, wall times and names of what was asked aside; NaN equals NaN."""
    old, new = _SAID(pair.before), _SAID(pair.after)
    return bool(old == new) or all(a == b or (a != a and b != b) for a, b in zip(old, new, strict=True))


def _with_times(cell: PairedCell, a: Results, b: Results) -> PairedCell:
    found = [_time(results, cell) for results in (a, b)]
    if found[0] is None or found[1] is None:
        return cell
    old, new = found[0], found[1]
    names = ("attention_seconds", "policy_seconds", "dense_seconds")
    times = [
        Amount(name, "wall seconds per token", "measured", getattr(old, name), getattr(new, name)) for name in names
    ]
    times.append(Amount("fraction", "attention time / dense's", "measured", old.fraction, new.fraction))
    apart = old.attention_high < new.attention_low or new.attention_high < old.attention_low
    return replace(cell, times=tuple(times), times_apart=apart)


def _time(results: Results, cell: PairedCell) -> LatencyResult | None:
    key = cell.model, cell.trace_set, cell.arm
    return next((row for row in results.latency if (row.model, row.trace_set, row.arm) == key), None)


def _corrected(cells: Sequence[PairedCell]) -> tuple[list[PairedCell], int]:
    """The cells with Holm's p over all their tests, and how many tests those are."""
    tested = [one.p_value for cell in cells for one in cell.contrasts if one.p_value is not None]
    adjusted = iter(holm(tested))

    def judged(contrast: Contrast) -> Contrast:
        if contrast.p_value is None:
            return contrast
        found = next(adjusted)
        return replace(contrast, adjusted=found, significant=None if math.isnan(found) else found < ALPHA)

    return [replace(cell, contrasts=tuple(map(judged, cell.contrasts))) for cell in cells], len(tested)


def _verdicts(a: Results, b: Results) -> tuple[Change, ...]:
    old, new = load_judgement(a.path), load_judgement(b.path)
    if old is None or new is None:
        return ()
    was = {verdict.arm: verdict.line for verdict in old.overall}
    found = {verdict.arm: verdict.line for verdict in new.overall}
    return tuple(Change(arm, was[arm], found[arm]) for arm in was if arm in found and was[arm] != found[arm])


def _notes(before: Questions, after: Questions, cells: Sequence[PairedCell]) -> Iterator[str]:
    gone = dict.fromkeys((*before.gone, *after.gone))
    if gone:
        yield f"{len(gone)} traces are no longer there; their questions are paired by the trace's name"
    contexts: list[Hashable] = [one for one in before.contents if one in after.contents]
    other = rerecorded(before, after, contexts)
    if other:
        yield (
            f"{other} of {len(contexts)} shared contexts were recorded with other bits of K, V or queries: "
            "differences are those of the recording, too"
        )
    for side, questions in (("A", before), ("B", after)):
        arms = [rows for found in questions.rows.values() for rows in found.values()]
        if any(not measured(rows.values(), ("task",)) for rows in arms):
            yield f"what is generated is not compared: in {side}, {NOT_GENERATED}"
    unpaired = [cell for cell in cells if not cell.questions]
    if unpaired:
        sets = dict.fromkeys(f"{cell.model}, {cell.trace_set}" for cell in unpaired)
        named = ", or traces that are gone, named by another version" if gone else ""
        yield f"no question in common on {'; '.join(sets)}: same name, other texts or other model weights{named}"
