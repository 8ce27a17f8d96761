"""Long rows of an experiment: each (row, length, layer) under all arms is a unit, computed in a process of its own.

A unit is written in one step, so a run may be killed at any moment and continued with the same command. The process
is there for its peak resident size, which is measured and reported. Synthetic rows carry quality only where their
ordering of policies was found to agree with recorded ones of the same shape.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import multiprocessing.connection
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvassay.errors import ExperimentError, KvassayError, LayoutError
from kvassay.experiment.arms import build_arms
from kvassay.experiment.code import replay_code
from kvassay.experiment.folder import LONG, RESOLVED, RunFolder
from kvassay.experiment.plan import arm_key, key_of
from kvassay.experiment.progress import Listener
from kvassay.experiment.provenance import machine, now
from kvassay.experiment.records import read_notes, read_records, write_records
from kvassay.experiment.schema import Experiment, Long
from kvassay.experiment.tokens import show_tokens
from kvassay.experiment.toml import resolved_toml
from kvassay.layout.bytes import bytes_at
from kvassay.layout.config import from_config
from kvassay.layout.model import KV, Layer, Layout
from kvassay.layout.serialize import layout_to_dict
from kvassay.measure.long import LongRow
from kvassay.policy.budget import Allowance
from kvassay.record.synthetic import statistics, validity
from kvassay.record.synthetic.rows import SyntheticLayer
from kvassay.replay.arms import Arm
from kvassay.replay.heads import replay_heads
from kvassay.replay.limits import refusal
from kvassay.replay.onehead import Outcome
from kvassay.replay.protocol import Protocol
from kvassay.runtime import peak_rss_bytes

Say = Callable[[str], None]
ENTRIES = ("kvassay.replay.heads", "kvassay.record.synthetic.rows")
"""Where the code begins that decides a unit's numbers."""


@dataclass(frozen=True)
class LongUnit:
    """One layer of one row at one length."""

    row: str
    tokens: int
    layer: int
    question: int
    like_it: int
    """Layers of the model whose state grows, of which `replayed` are replayed."""
    replayed: int

    @property
    def title(self) -> str:
        """One line for people."""
        return (
            f"{self.row}, {show_tokens(self.tokens)}, layer {self.layer} ({self.replayed} of {self.like_it} replayed)"
        )


@dataclass(frozen=True)
class LongPlan:
    """What an experiment's long rows ask for."""

    experiment: Experiment
    source: str
    base: Path
    arms: tuple[Arm, ...]
    units: tuple[LongUnit, ...]
    code: str

    @property
    def protocol(self) -> Protocol:
        """Block size and seed."""
        about = self.experiment
        return Protocol(block_size=about.protocol.block_size, seed=about.experiment.seed)

    def refused(self, unit: LongUnit) -> dict[str, str]:
        """Arms that are not replayed at this length, with the reason and the estimate."""
        layer = from_config(unit.row).layers[unit.layer]
        found = {arm.label: refusal(arm, layer, unit.tokens, unit.question) for arm in self.arms}
        return {label: reason for label, reason in found.items() if reason is not None}

    def key(self, unit: LongUnit) -> str:
        """What decides a unit's numbers."""
        return key_of(
            {
                "unit": dataclasses.asdict(unit),
                "layout": layout_to_dict(from_config(unit.row)),
                "arms": [arm_key(arm) for arm in self.arms],
                "protocol": dataclasses.asdict(self.protocol),
                "statistics": statistics.shipped().sha256,
                "valid": [dataclasses.asdict(entry) for entry in validity.known()],
                "code": self.code,
            }
        )


def plan_long(experiment: Experiment, source: str, base: Path) -> LongPlan:
    """Check the long rows of an experiment; `ExperimentError` for an unknown row, one without growing K/V layers, or a
    budget that leaves nothing."""
    arms = build_arms(experiment, source, base)
    units = []
    for number, wanted in enumerate(experiment.long):
        place = f"{source}: [[long]] {number + 1}"
        try:
            layout = from_config(wanted.row)
        except LayoutError as error:
            raise ExperimentError(f"{place}: row: {error}") from None
        growing = growing_layers(layout)
        if not growing:
            raise ExperimentError(f"{place}: row: '{wanted.row}' has no layer with keys and values per head that grow")
        units += _units(wanted, growing)
    for unit in units:
        for arm in arms:
            try:
                Allowance.resolve(arm.budget, unit.tokens, arm.protection)
            except KvassayError as error:
                raise ExperimentError(f"{source}: [[long]] {unit.row}, arm '{arm.label}': {error}") from None
    code = replay_code((arm.policy for arm in arms), ENTRIES)
    return LongPlan(experiment, source, base, tuple(arms), tuple(dict.fromkeys(units)), code)


def growing_layers(layout: Layout) -> list[Layer]:
    """Layers that hold keys and values per head of every token."""
    return [layer for layer in layout.storing if layer.kind == "full" and isinstance(layer.kv, KV)]


def _units(wanted: Long, growing: Sequence[Layer]) -> list[LongUnit]:
    """Lengths times layers, these evenly spaced; of one the middle."""
    count = min(wanted.layers, len(growing))
    chosen = [growing[(2 * place + 1) * len(growing) // (2 * count)] for place in range(count)]
    return [
        LongUnit(wanted.row, tokens, layer.index, wanted.question, len(growing), count)
        for tokens in wanted.lengths
        for layer in chosen
    ]


def run_long(plan: LongPlan, path: Path, listener: Listener) -> tuple[LongRow, ...]:
    """Compute what is left of the long rows in the run folder and put all of them into `long.parquet`.

    Raises `ExperimentError` if another run holds the folder or a process died, e.g. for lack of memory.
    """
    folder = RunFolder(path)
    rows: list[LongRow] = []
    with folder.locked():
        if not (folder.path / RESOLVED).is_file():
            folder.write_text(folder.path / RESOLVED, resolved_toml(plan.experiment))
        for unit in plan.units:
            target = folder.long_row(plan.key(unit))
            listener.begin(unit.title)
            found = read_records(target, LongRow)
            if not found:
                computed = _in_a_process(plan, unit, listener)
                folder.write(target, partial(write_records, computed, LongRow))
            rows += found or computed
            listener.end(bool(found))
        notes = {
            "code_sha256": plan.code,
            "machine": json.dumps(machine("cpu")),
            "finished": now(),
            "refused": json.dumps(_refusals(plan)),
        }
        folder.write(folder.path / LONG, lambda file: write_records(rows, LongRow, file, notes))
    return tuple(rows)


def _refusals(plan: LongPlan) -> dict[str, str]:
    """Arms that some row was not replayed under: label, from which row and length on, and the reason there."""
    found: dict[str, str] = {}
    for unit in sorted(plan.units, key=lambda unit: unit.tokens):
        for label, reason in plan.refused(unit).items():
            found.setdefault(label, f"{unit.row} from {show_tokens(unit.tokens)} tokens on: {reason}")
    return found


def read_long(run: Path) -> tuple[tuple[LongRow, ...], dict[str, str]]:
    """The long rows of a run folder, none if it has none, and the arms that were not replayed, with reasons."""
    file = run / LONG
    return read_records(file, LongRow), json.loads(read_notes(file).get("refused", "{}"))


def _in_a_process(plan: LongPlan, unit: LongUnit, listener: Listener) -> list[LongRow]:
    """A unit's rows from a fresh process, whose steps are passed on."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_compute, args=(there, plan.experiment, plan.source, plan.base, unit), daemon=True)
    process.start()
    there.close()
    try:
        while True:
            kind, value = here.recv()
            if kind == "rows":
                return list(value)
            if kind == "error":
                raise ExperimentError(f"{unit.title}: {value}")
            listener.step(value)
    except EOFError:
        process.join()
        raise ExperimentError(
            f"{unit.title}: its process died with status {process.exitcode}, perhaps for lack of memory; the same "
            "command continues"
        ) from None
    finally:
        process.terminate()
        process.join()


def _compute(
    to: multiprocessing.connection.Connection, experiment: Experiment, source: str, base: Path, unit: LongUnit
) -> None:
    """In the new process: plan again, since policies from files cannot be sent, and replay one unit."""
    try:
        plan = plan_long(experiment, source, base)
        to.send(("rows", long_rows(plan, unit, lambda step: to.send(("step", step)))))
    except KvassayError as error:
        to.send(("error", str(error)))


def long_rows(plan: LongPlan, unit: LongUnit, say: Say) -> list[LongRow]:
    """One layer under all arms that can be replayed at its length."""
    layout, known = from_config(unit.row), statistics.shipped()
    layer, out = layout.layers[unit.layer], plan.refused(unit)
    place = layout.storing.index(layer) / max(1, len(layout.storing) - 1)
    drawn = SyntheticLayer(
        layer,
        known.at(place),
        known.scale,
        context=unit.tokens,
        question=unit.question,
        seed=plan.experiment.experiment.seed,
    )
    arms = [arm for arm in plan.arms if arm.label not in out]
    outcomes = replay_heads(drawn, layout, arms, plan.protocol, say)
    judges = validity.judges(known, layer)
    return [_row(unit, plan, layout, known.name, outcome, judges) for outcome in outcomes]


def _row(unit: LongUnit, plan: LongPlan, layout: Layout, known: str, outcome: Outcome, judges: bool) -> LongRow:
    layer, deviation = layout.layers[unit.layer], outcome.deviation
    freed = outcome.freed(layer, plan.protocol.block_size, layout.element_bytes)
    asked = unit.question
    return LongRow(
        source="synthetic",
        statistics=known,
        row=unit.row,
        tokens=unit.tokens,
        layer=unit.layer,
        kind=layer.kind,
        layers_like_it=unit.like_it,
        layers_replayed=unit.replayed,
        arm=outcome.arm.label,
        judges=judges,
        retained_bytes=outcome.held,
        retained_fraction=outcome.held / outcome.dense,
        sliding_bytes=bytes_at(layout, unit.tokens).sliding,
        blocks_total=-(-unit.tokens // plan.protocol.block_size),
        blocks_freed_layer=freed["per_layer_tables"],
        blocks_freed_head=freed["per_head_tables"],
        read_bytes=(deviation.read + deviation.scanned) / asked,
        read_fraction=(deviation.read + deviation.scanned) / deviation.dense,
        scan_bytes=deviation.scanned / asked,
        policy_bytes=outcome.touched,
        decide_seconds=outcome.decide_seconds,
        summarize_seconds=outcome.summarize_seconds,
        select_seconds=outcome.select_seconds / asked,
        peak_rss_bytes=peak_rss_bytes(),
        output_error=deviation.output_error if judges else None,
        retained_mass=deviation.retained_mass if judges else None,
        target_recall=outcome.found / outcome.targets if judges and outcome.targets else None,
    )
