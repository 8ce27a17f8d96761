"""Averages that hide what was lost."""

from __future__ import annotations

from kvassay.measure.statistics import flips, mcnemar, worst_decile


def test_a_mean_above_dense_still_names_what_was_lost() -> None:
    """LLMkvsys/rethink-kv-compression, published scores: KIVI at 4 bits has a mean of 41.29, above full's 41.22, yet
    200 of 3,350 samples lose a tenth or more. Flips and the worst decile stand beside every mean."""
    dense = [True] * 200 + [False] * 210 + [True] * 2940
    arm = [False] * 200 + [True] * 210 + [True] * 2940
    found = flips(dense, arm)
    assert (found.right_to_wrong, found.wrong_to_right) == (200, 210)
    assert sum(arm) > sum(dense)
    assert mcnemar(found.right_to_wrong, found.wrong_to_right) > 0.5
    changes = [float(b) - float(a) for a, b in zip(dense, arm, strict=True)]
    assert worst_decile(changes, "higher") == -200 / 335
