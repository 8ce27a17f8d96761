"""What a run takes out of the tables of its folder, in words: extending a folder is allowed, but never silent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvassay.experiment.asked import short_model
from kvassay.experiment.folder import GATE, RunFolder
from kvassay.experiment.plan import Plan

NAMED = 3
"""How many arms or workloads are named; the rest are counted."""


def replaced_lines(folder: RunFolder, earlier: Mapping[str, Any], plan: Plan) -> list[str]:
    """One line for arms or workloads that leave the table, and one where a gate that lies in the folder judges others.

    earlier: manifest of the folder's earlier run; empty if there is none
    """
    if not earlier:
        return []
    arms = [arm.label for arm in plan.arms]
    sets = [f"{short_model(item.model)} on {item.label}" for item in plan.trace_sets]
    had_arms = [item["label"] for item in earlier["arms"]]
    had_sets = [f"{item['model']} on {item['trace_set']}" for item in earlier["trace_sets"]]
    left = [
        f"other {what} ({_some(gone)})"
        for what, gone in (("arms", _without(had_arms, arms)), ("workloads", _without(had_sets, sets)))
        if gone
    ]
    lines = []
    if left:
        lines.append(f"{folder.path} held {' and '.join(left)}: they leave the table; their contexts stay in units/")
    if (left or _without(arms, had_arms) or (had_sets and _without(sets, had_sets))) and (folder.path / GATE).is_file():
        lines.append(f"{folder.path / GATE} was pinned for this folder: it judges this run too")
    return lines


def _without(these: Sequence[str], those: Sequence[str]) -> list[str]:
    return [item for item in these if item not in those]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
