"""A made-up run folder with everything a report can show: verdicts, findings, times, drafts, traces, kept positions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from kvassay.experiment.findings import dump_findings
from kvassay.experiment.folder import CELLS, CHECKS, COST, FIDELITY, LATENCY, MANIFEST, SAMPLES, SPECULATION
from kvassay.experiment.records import write_records
from kvassay.experiment.results import Results
from kvassay.experiment.rows import write_cells, write_samples
from kvassay.layout.model import KV, Component, Layer, Layout, Window
from kvassay.layout.serialize import layout_to_dict
from kvassay.measure.acceptance import AcceptanceResult
from kvassay.measure.aggregate import aggregate
from kvassay.measure.checks import Finding
from kvassay.measure.cost import CostResult
from kvassay.measure.latency import LatencyResult
from kvassay.measure.result import LayerFidelity
from kvassay.measure.verdict import VERDICTS, Check, Judgement, Verdict, dump_judgement
from tests.runs import make_run, rows

MODEL, SET = "tiny-model", "kv_short 2k"
SNAPKV = "snapkv(window=16) keep=0.25"
LAYOUT = Layout(
    "tiny",
    (
        Layer(0, 4, (Component(KV(2, 4, 4)),), 0.5),
        Layer(1, 4, (Component(KV(2, 4, 4), Window(128)),), 0.5),
    ),
    8,
    50,
    4096,
)
"""A full layer of 2 heads x 8 numbers, and a sliding one."""
FINDINGS = (
    Finding("underpowered", "note", None, "2 contexts"),
    Finding("budget_base", "suspect", SNAPKV, "holds 512 of <b>2048</b> tokens"),
)
CHECKS_MADE = (
    Check("quality top1", -0.05, "at_least", -0.375, None, None, False, "measured", unit="fraction"),
    Check("latency", 1.2, "at_least", 1.6, None, None, True, "modelled", hardware="H200", unit="dense / arm"),
)
VERDICT = Verdict("", "", SNAPKV, "reject", "quality top1: -0.375, at least -0.05", "tiny-model; kv_short", False)
PART = replace(VERDICT, trace_set=SET, workload="kv_short", model=MODEL, checks=CHECKS_MADE)


def timed(arm: str, attention: float, policy: float) -> LatencyResult:
    return LatencyResult(
        model=MODEL, trace_set=SET, arm=arm, context_tokens=2048, rounds=7, attention_seconds=attention,
        attention_low=0.9 * attention, attention_high=1.1 * attention, policy_seconds=policy, dense_seconds=0.02,
        read_bytes=1e6, flops=1e6, gigabytes_per_second=1.0, bandwidth_fraction=0.5, matrix_fraction=0.5,
        hardware="Some CPU, 2 threads",
    )  # fmt: skip


def modelled(arm: str, seconds: float) -> CostResult:
    return CostResult(MODEL, SET, arm, "H200", 1, 2048, seconds, 1e-4, None)


def drafted(mode: str, k: int = 2) -> AcceptanceResult:
    """Two drafts of two tokens, cut to `k`: both accepted, then none."""
    return AcceptanceResult(
        k=k, rounds=2, num_drafts=2, num_draft_tokens=2 * k, num_accepted_tokens=k, trace="t0",
        num_accepted_tokens_per_pos=(1, 1)[:k], num_draft_tokens_per_pos=(2, 2)[:k], reached_per_pos=(2, 1)[:k],
        overlap_per_pos=(1.5, 0.75)[:k], workload="kv_short", branch=0, arm=SNAPKV, mode=mode, drafter="compressed",
        target="dense", context_tokens=2048,
    )  # fmt: skip


def screened(branch: int, heads: tuple[float, ...]) -> LayerFidelity:
    return LayerFidelity("t0", "kv_short", branch, SNAPKV, 0, sum(heads) / 2, 0.75, head_errors=heads)


def make_full_run(folder: Path, *, judged: bool = True, exploratory: bool = False) -> Results:
    make_run(folder)
    kept = {SNAPKV: (1.0,) + (0.25,) * 62 + (1.0,), "dense": (1.0,) * 64}
    found = [replace(row, kept=kept.get(row.arm, ()) if row.branch == 0 else ()) for row in rows()]
    wrong = ' 99 "</script><script>alert(1)</script>'
    found = [replace(row, generated=wrong) if row.task < 1 else row for row in found]
    write_samples([({"model": MODEL, "trace_set": SET}, found)], folder / SAMPLES)
    (folder / CHECKS).write_text(dump_findings({(MODEL, SET): FINDINGS}), encoding="utf-8")
    write_records([timed("dense", 0.02, 0.0), timed(SNAPKV, 0.01, 0.005)], LatencyResult, folder / LATENCY)
    write_records([modelled("dense", 1e-4), modelled(SNAPKV, 4e-5)], CostResult, folder / COST)
    write_records(
        [drafted("teacher_forced", 1), drafted("teacher_forced"), drafted("free_running")],
        AcceptanceResult,
        folder / SPECULATION,
    )
    write_records([screened(0, (0.4, 0.2)), screened(1, (0.8, 0.4))], LayerFidelity, folder / FIDELITY)
    for name in ("t0", "t1"):
        (folder / "traces" / name).mkdir(parents=True)
        header = {"layout": layout_to_dict(LAYOUT), "branches": [{"answer_text": " 12|34"}, {"answer_text": " 5"}]}
        (folder / "traces" / name / "trace.json").write_text(json.dumps(header), encoding="utf-8")
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    manifest["units"] = [{"model": MODEL, "trace_set": SET, "context": 0, "trace": "t0", "unit": "0123"}]
    manifest["models"] = [{"name": MODEL, "weights_sha256": "a" * 64, "tokenizer_sha256": "b" * 64, "licence": "MIT"}]
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    if judged:
        judgement = Judgement(
            gate="mine", gate_sha256="c" * 64, declared=None if exploratory else "2026-01-01T00:00:00+00:00",
            judged="2026-01-03T00:00:00+00:00", exploratory=exploratory,
            warning="EXPLORATORY: the gate was written after the cells" if exploratory else "",
            cells_sha256=hashlib.sha256((folder / CELLS).read_bytes()).hexdigest(),
            verdicts=tuple(replace(one, exploratory=exploratory) for one in (VERDICT, PART)),
            excluded={"dense": "dense"}, notes=("one note",),
        )  # fmt: skip
        (folder / VERDICTS).write_text(dump_judgement(judgement), encoding="utf-8")
    return Results.open(folder)


def make_two_sets(folder: Path) -> Results:
    """The same with a second workload, on which kivi has a top-1 of 0.25; its verdicts are about earlier cells."""
    first = make_full_run(folder)
    second = [replace(row, top1=0.25, workload="copy") if row.arm == "kivi" else row for row in rows()]
    labels = {"model": MODEL, "trace_set": SET}
    cells = [(labels, first.sets[0].cells), ({**labels, "trace_set": "copy 2k"}, aggregate(second).cells)]
    write_cells(cells, folder / CELLS)
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    manifest["trace_sets"].append({**manifest["trace_sets"][0], "trace_set": "copy 2k", "name": "copy"})
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return Results.open(folder)
