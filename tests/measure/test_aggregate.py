from __future__ import annotations

import pytest

from kvassay.errors import ExperimentError
from kvassay.measure.aggregate import aggregate
from kvassay.measure.metrics import CARDS
from kvassay.measure.result import BranchResult
from tests.rows import SILENT, row


def _two_arms() -> list[BranchResult]:
    """Two contexts of two questions; the arm loses one of dense's three right answers and gains one."""
    dense_task = {("t0", 0): 1.0, ("t0", 1): 1.0, ("t1", 0): 1.0, ("t1", 1): 0.0}
    arm_task = {("t0", 0): 1.0, ("t0", 1): 0.5, ("t1", 0): 1.0, ("t1", 1): 1.0}
    arm_nll = {("t0", 0): 0.5, ("t0", 1): 2.5, ("t1", 0): 0.75, ("t1", 1): 1.25}
    rows = [row("dense", trace, branch, task=task) for (trace, branch), task in dense_task.items()]
    return rows + [
        row(
            "knorm keep=0.25",
            trace,
            branch,
            task=task,
            nll=arm_nll[trace, branch],
            retained_fraction=0.25,
            retained_bytes=256.0 + branch,
            peak_bytes=1000.0 * (branch + 1),
            divergence=3 if task < 1 else None,
            wrong_step=None,
            blocks_freed={"whole_block": 1.0 + branch, "per_head_tables": 64.0},
        )
        for (trace, branch), task in arm_task.items()
    ]


def test_cells_by_hand() -> None:
    found = aggregate(_two_arms())
    dense, arm = found.cells
    assert found.missing == ()
    assert (dense.arm, arm.arm, arm.samples, arm.contexts) == ("dense", "knorm keep=0.25", 4, 2)
    assert dense.quality["task"].mean == 0.75
    assert arm.quality["task"].mean == 0.875
    assert arm.quality["nll"].mean == 1.25
    assert arm.difference["nll"].mean == 0.75
    assert dense.difference["nll"].mean == 0.0
    # Two contexts give no interval, and so no noise; their means of the difference, 1.0 and 0.5, give an error.
    assert (arm.difference["nll"].low, arm.difference["nll"].high) == (None, None)
    assert arm.difference["nll"].error == pytest.approx(0.25)
    assert arm.noise["nll"] is None
    flipped = arm.flips["task"]
    assert (flipped.right_to_wrong, flipped.wrong_to_right, flipped.p_value) == (1, 1, 1.0)
    assert (arm.worst["nll"], arm.worst["task"]) == (2.5, 0.5)
    assert (arm.worst_difference["nll"], arm.worst_difference["task"]) == (2.0, -0.5)
    assert arm.diverged == 1
    assert arm.amounts["retained_fraction"] == 0.25
    assert arm.amounts["retained_bytes"] == 256.5
    assert arm.peak_bytes == 2000.0
    assert arm.blocks_freed == {"whole_block": 1.5, "per_head_tables": 64.0}


def test_paired_interval_is_narrower_than_the_unpaired_when_arms_move_together() -> None:
    levels = {"t0": 0.1, "t1": 1.0, "t2": 3.0, "t3": 2.0, "t4": 0.5}
    rows = [row("dense", t, nll=v) for t, v in levels.items()]
    rows += [row("snapkv keep=0.25", t, nll=v + 0.25 + n / 100) for n, (t, v) in enumerate(levels.items())]
    arm = aggregate(rows).cells[1]
    paired, unpaired = arm.difference["nll"].half_width, arm.quality["nll"].half_width
    assert paired is not None and unpaired is not None
    assert paired < 0.03 and unpaired > 1


def test_noise_is_dense_agains_reach_where_that_is_larger() -> None:
    traces = [f"t{n}" for n in range(6)]
    rows = [row("dense", t) for t in traces]
    rows += [row("dense'", t, nll=0.5 + n / 10) for n, t in enumerate(traces)]
    rows += [row("snapkv keep=0.25", t, nll=0.7 + n / 1000) for n, t in enumerate(traces)]
    _, again, arm = aggregate(rows).cells
    assert again.difference["nll"].high is not None and again.difference["nll"].high > 0.4
    assert arm.noise["nll"] == again.difference["nll"].high
    # Without spread in a metric without bounds there is no interval, so no claim.
    assert arm.difference["generated_tokens"].mean == 0 and arm.noise["generated_tokens"] is None
    # Six contexts without a lost answer still allow a loss of the mean of 1 - 0.025^(1/6).
    assert arm.noise["task"] == pytest.approx(1 - 0.025 ** (1 / 6))


def test_averages_run_over_shared_questions_and_name_what_is_missing() -> None:
    rows = [row("dense", "t0", 0, nll=1.0), row("dense", "t1", 0, nll=9.0), row("fp8", "t0", 0, nll=1.5)]
    found = aggregate(rows)
    assert [cell.quality["nll"].mean for cell in found.cells] == [1.0, 1.5]
    assert found.cells[0].samples == 1
    assert found.missing == ("fp8: lacks 1 of 2 questions, first t1 question 0",)


def test_no_shared_question_is_refused_with_the_arms_named() -> None:
    with pytest.raises(ExperimentError, match="no question was answered by all 2 arms; dense: lacks 1 of 2"):
        aggregate([row("dense", "t0"), row("fp8", "t1")])


def test_a_question_answered_twice_is_refused() -> None:
    with pytest.raises(ExperimentError, match="dense: t0 question 0 appears twice"):
        aggregate([row(), row()])


def test_without_dense_nothing_is_compared() -> None:
    cell = aggregate([row("fp8")]).cells[0]
    assert cell.difference == {} and cell.flips == {}


def test_every_metric_is_a_number_of_the_result_and_says_unit_and_direction() -> None:
    for name, card in CARDS.items():
        assert isinstance(getattr(row(), name), float | int)
        assert card.unit and card.formula and card.better in ("higher", "lower", "none")


@pytest.mark.parametrize("task", [None, 0.0])
def test_what_was_never_generated_is_no_number(task: float | None) -> None:
    """Older rows say task 0 and 0 tokens; the teacher-forced numbers are there as ever."""
    rows = [
        row(arm, f"t{n}", top1=top1, **{**SILENT, "task": task}) for arm, top1 in (("dense", 1.0), ("fp8", 0.5))
        for n in range(6)
    ]  # fmt: skip
    dense, arm = aggregate(rows).cells
    there = {"top1", "nll", "kl", "agree"}
    for numbers in (arm.quality, arm.difference, arm.noise, arm.worst, arm.worst_difference):
        assert set(numbers) == there
    assert set(arm.flips) == {"top1"} and arm.flips["top1"].right_to_wrong == 6
    assert (arm.diverged, dense.diverged) == (None, None)
    assert (arm.quality["top1"].mean, arm.difference["top1"].mean) == (0.5, -0.5)
