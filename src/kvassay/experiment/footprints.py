"""Footprints for serving: read off a run's cells, or stated in a file."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

from kvassay.cache.reclaim import MODES, Mode
from kvassay.errors import CacheError, ExperimentError, did_you_mean
from kvassay.experiment.arminfo import ArmInfo
from kvassay.experiment.results import Results, SetResult
from kvassay.measure.aggregate import DENSE, Cell
from kvassay.policy.card import When
from kvassay.replay.serving.cost import TableTimes
from kvassay.replay.serving.footprint import Footprint, Timing

WRITING: tuple[Mode, ...] = ("slot_reuse", "compaction")
"""Modes in which kept tokens or later ones are written into blocks that have a prefix hash."""


def load_footprints(
    sources: Sequence[str | Path],
    mode: Mode = "whole_block",
    arms: Sequence[str] = (),
    trace_set: str | None = None,
    timing: Timing | None = None,
) -> list[Footprint]:
    """The footprints of run folders' arms, and of TOML files' `[[footprint]]` tables.

    sources: an arm is taken from a file that states it, or else from the first run that has it
    arms: labels to take; of a run, by default all but dense, the references, which no engine can run, and what acts on
        generated tokens alone: a run counts the blocks that its contexts free, so those are stated in a file.
    trace_set: which of a run's trace sets; by default the one with the longest contexts.
    timing: when an arm's bytes shrink, in place of what the file says, or of what the arm is: from the first token on
        if it prefills by itself or acts on what is written (fp8), whatever prefill the run measured it after.

    Raises:
        ExperimentError: an unknown file, arm, set or key.
    """
    found: dict[str, Footprint] = {}
    for path in sorted(map(Path, sources), key=lambda path: path.suffix != ".toml"):
        lacking = [label for label in arms if label not in found]
        if arms and not lacking:
            break
        stated = path.suffix == ".toml"
        for one in _stated(path) if stated else _measured(Results.open(path), mode, lacking, trace_set):
            found.setdefault(one.arm, one)
    for label in arms:
        if label not in found:
            places = ", ".join(map(str, sources))
            raise ExperimentError(f"{places}: no arm '{label}'{did_you_mean(label, found)}")
    wanted = [footprint for footprint in found.values() if not arms or footprint.arm in arms]
    return wanted if timing is None else [replace(footprint, timing=timing) for footprint in wanted]


def load_times(path: Path) -> TableTimes:
    """Step times of a TOML file: `step`, `token` and `context` seconds, see `TableTimes`."""
    table = _toml(path)
    for key, value in table.items():
        if key not in ("step", "token", "context"):
            raise ExperimentError(f"{path}: unknown key '{key}'{did_you_mean(key, ('step', 'token', 'context'))}")
        if not _fits("float", value) or value < 0:
            raise ExperimentError(f"{path}: {key} = {value!r} is no time of at least 0")
    if not table.get("step"):
        raise ExperimentError(f"{path}: missing key 'step', seconds of an empty step, above 0")
    return TableTimes(**table, how=f"table: {path.name}")


def _measured(results: Results, mode: Mode, arms: Sequence[str], trace_set: str | None) -> list[Footprint]:
    found = _set(results, trace_set)
    dense = found.cell(DENSE)
    if dense is None:
        raise ExperimentError(f"{results.path}: {found.label} has no dense arm to compare with")
    wanted = [
        cell
        for cell in found.cells
        if not cell.arm.startswith(DENSE) and (cell.arm in arms or _can_be_served(results.arms[cell.arm]))
    ]
    return [_footprint(results, found, cell, dense, mode) for cell in wanted]


def _set(results: Results, label: str | None) -> SetResult:
    if label is None:
        return max(results.sets, key=lambda found: found.length)
    for found in results.sets:
        if label in (found.label, f"{found.model} {found.label}"):
            return found
    raise ExperimentError(
        f"{results.path}: no trace set '{label}'{did_you_mean(label, [s.label for s in results.sets])}"
    )


def _footprint(results: Results, found: SetResult, cell: Cell, dense: Cell, mode: Mode) -> Footprint:
    info = results.arms[cell.arm]
    if _later_only(info):
        raise ExperimentError(
            f"{results.path}: {cell.arm} acts on generated tokens alone, and a run counts blocks that contexts free; "
            "state its footprint in a file, with timing = 'every_n'"
        )
    blocks = cell.amounts["blocks_total"]
    freed = cell.blocks_freed.get(mode)
    if freed is None:
        raise ExperimentError(f"{results.path}: {cell.arm}: blocks freed by {mode} were not measured")
    # What lies outside the arm's scope (windows) is read as it is held, by dense and by the arm alike.
    outside = dense.amounts["retained_bytes"] - dense.amounts["retained_bytes_scope"]
    read = (cell.amounts["read_bytes"] - outside) / (dense.amounts["read_bytes"] - outside)
    # A selector's side data lies beside the blocks, also where what it selects over makes them fewer or smaller.
    packed = 1 - max(cell.blocks_freed.values()) / blocks if blocks and "select" in info.effects else 1.0
    return Footprint(
        arm=cell.arm,
        mode=mode,
        how="measured",
        source=f"{results.path.name}: {found.model}, {found.label}, {found.length} tokens, {cell.samples} questions",
        timing="from_start" if info.own_prefill or When.ON_WRITE in info.when else "after_prefill",
        selected_fraction=cell.amounts["selected_tokens"] / dense.amounts["selected_tokens"],
        retained_fraction=cell.amounts["retained_fraction_scope"],
        freed_fraction=min(max(freed / blocks, 0.0), 1 - 1 / max(blocks, 2)) if blocks else 0.0,
        read_fraction=max(read, 0.0),
        writes=bool(info.approximates) or (mode in WRITING and freed > 0),
        side_fraction=max(cell.amounts["retained_fraction_scope"] - packed, 0.0),
        scan_fraction=cell.amounts["policy_bytes"] / dense.amounts["retained_bytes_scope"],
        correct=_task(cell),
        dense_correct=_task(dense),
    )


def _task(cell: Cell) -> float | None:
    """The mean task score; None if nothing was generated."""
    found = cell.quality.get("task")
    return None if found is None else found.mean


def _can_be_served(info: ArmInfo) -> bool:
    return not info.reference and not _later_only(info)


def _later_only(info: ArmInfo) -> bool:
    """Whether the policy edits generated tokens and leaves every prompt as it is."""
    return "evict" in info.effects and not {"after_prefill", "offline"} & set(info.when) and bool(info.when)


def _stated(path: Path) -> list[Footprint]:
    data = _toml(path)
    tables = data.get("footprint")
    if not isinstance(tables, list) or set(data) != {"footprint"}:
        raise ExperimentError(f"{path}: holds [[footprint]] tables and nothing else, not {sorted(data)}")
    found = [_one(f"{path}: footprint {number}", table) for number, table in enumerate(tables, 1)]
    if twice := [arm for arm, times in Counter(one.arm for one in found).items() if times > 1]:
        raise ExperimentError(f"{path}: arm '{twice[0]}' is stated twice; give each its own name")
    return found


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ExperimentError(f"{path}: cannot be read: {error}") from None


def _one(where: str, table: dict[str, Any]) -> Footprint:
    kinds = {field.name: field.type for field in fields(Footprint) if field.name not in ("how", "source")}
    for key, value in table.items():
        if key not in kinds:
            raise ExperimentError(f"{where}: unknown key '{key}'{did_you_mean(key, kinds)}")
        allowed: dict[str, tuple[str, ...]] = {"mode": MODES, "timing": get_args(Timing)}
        if key in allowed and value not in allowed[key]:
            raise ExperimentError(f"{where}: {key} = {value!r}{did_you_mean(str(value), allowed[key])}")
        if not _fits(str(kinds[key]), value):
            raise ExperimentError(f"{where}: {key} = {value!r} is no {kinds[key]}")
    if "arm" not in table:
        raise ExperimentError(f"{where}: missing key 'arm'")
    try:
        return Footprint(**table, how="assumed", source=where)
    except CacheError as error:
        raise ExperimentError(f"{where}: {error}") from None


def _fits(kind: str, value: object) -> bool:
    if kind.startswith("float"):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, bool if kind == "bool" else str)
