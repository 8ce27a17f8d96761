"""What a run takes out of the tables of its folder, in words: extending a folder is allowed, but never silent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvassay.experiment.asked import short_model
from kvassay.experiment.code import policy_code
from kvassay.experiment.folder import GATE, RunFolder
from kvassay.experiment.plan import Plan
from kvassay.replay.arms import Arm

VERSIONS = ("torch", "transformers")
"""Libraries whose version decides the numbers; as in the manifest."""
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


def other_policies(manifest: Mapping[str, Any], arms: Sequence[Arm]) -> list[str]:
    """Labels of the arms whose policies have another code here than the results of a manifest were computed with."""
    return _changed(manifest.get("policy_code", {}), {arm.label: policy_code(arm.policy) for arm in arms})


def _changed(had: Mapping[str, str], has: Mapping[str, str]) -> list[str]:
    return [label for label, code in has.items() if had.get(label, code) != code]


def changed_code(folder: RunFolder, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """One line if the folder's results are of other code: which, and what becomes of them; None if they are not.

    earlier, now: manifests of the folder's earlier run, empty if there is none, and of the one that begins
    """
    had, has = (manifest.get("policy_code", {}) for manifest in (earlier, now))
    arms = _changed(had, has)
    other = [
        f"{name} {earlier['machine'][name]} (now {now['machine'][name]})"
        for name in VERSIONS
        if earlier and earlier["machine"][name] != now["machine"][name]
    ]
    if arms:
        other.insert(0, f"another code of {_some(arms)}")
    elif earlier and had.keys() == has.keys() and earlier.get("code_sha256") != now["code_sha256"]:
        other.insert(0, "another code of kvassay's replay")
    if not other:
        return None
    return (
        f"{folder.path}: its results were computed with {' and '.join(other)}: every arm is computed anew, on the "
        "contexts recorded there, and no row of before gets into the new tables. These replace the tables and reports "
        "when all is done; the rows of before stay in units/. To keep both, stop now and choose another --out"
    )


def _without(these: Sequence[str], those: Sequence[str]) -> list[str]:
    return [item for item in these if item not in those]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
