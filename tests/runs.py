"""A run folder with made-up numbers, written without a model or a replay."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvassay.experiment.arminfo import ArmInfo
from kvassay.experiment.folder import CELLS, MANIFEST, SAMPLES
from kvassay.experiment.results import Results, dump_manifest
from kvassay.experiment.rows import write_cells, write_samples
from kvassay.measure.aggregate import aggregate
from kvassay.measure.result import RECLAIM_MODES, BranchResult
from tests.rows import DENSE_BYTES, row


def arm(label: str, *, exact: bool = True, reference: bool = False, always: bool = True, **more: Any) -> ArmInfo:
    policy, _, budget = label.partition(" ")
    return ArmInfo(
        label=label,
        policy=policy,
        budget=budget or None,
        exact=exact,
        approximates=() if exact else ("keys", "values"),
        reference=reference,
        reconstruction=False,
        always_on=always,
        source=f"source of {policy}",
        summary=f"summary of {policy}",
        **more,
    )


ARMS = (
    arm("dense"),
    arm("dense'"),
    arm("hindsight keep=0.25", reference=True),
    arm("fp8", exact=False, when=("after_prefill", "on_write")),
    arm("snapkv(window=16) keep=0.25", always=False, deviations=("keeps its rotation",)),
    arm("kivi", exact=False, always=False),
)


def held(fraction: float, **changes: Any) -> dict[str, Any]:
    return {
        "retained_bytes": fraction * DENSE_BYTES,
        "retained_fraction": fraction,
        "retained_bytes_scope": fraction * DENSE_BYTES / 2,
        "retained_fraction_scope": fraction / 2,
        "read_bytes": fraction * 900 * 1024,
        "read_fraction": fraction,
        "read_bytes_growing": fraction * 225 * 1024,
        **changes,
    }


def rows(query_aware: bool = False) -> list[BranchResult]:
    """Two contexts with two questions: snapkv loses one answer, has top-1 of 1, 0.5, 0.5 and 0.5."""
    found = []
    for trace in ("t0", "t1"):
        for branch in (0, 1):
            place = {"trace": trace, "branch": branch, "query_aware": query_aware}
            first = (trace, branch) == ("t0", 0)
            freed = dict(zip(RECLAIM_MODES, (3.0, 20.0, 80.0, 64.0, 96.0), strict=True))
            found += [
                row("dense", **place),
                row("dense'", **place, nll=0.501, kl=0.0004),
                row("hindsight keep=0.25", **place, **held(0.25, top1=1.0, kl=0.01)),
                row("fp8", **place, **held(0.53, kl=0.02)),
                row(
                    "snapkv(window=16) keep=0.25",
                    **place,
                    **held(0.25, top1=1.0 if first else 0.5, nll=1.25, kl=0.75, agree=0.5, blocks_freed=freed),
                    task=0.0 if first else 1.0,
                    divergence=2 if first else None,
                    wrong_step=None,
                    policy_seconds=0.125,
                ),
                row("kivi", **place, **held(0.2, top1=0.75, nll=0.9, kl=0.3)),
            ]
    return found


def make_run(folder: Path, *, query_aware: bool = False, finished: bool = True) -> Results:
    labels = {"model": "tiny-model", "trace_set": "kv_short 2k"}
    folder.mkdir(parents=True, exist_ok=True)
    found = aggregate(rows(query_aware))
    write_samples([(labels, rows(query_aware))], folder / SAMPLES)
    write_cells([(labels, found.cells)], folder / CELLS)
    manifest = {
        "schema": 1,
        "name": "made-up",
        "started": "2026-01-02T03:04:05+00:00",
        "finished": "2026-01-02T04:04:05+00:00" if finished else None,
        "machine": {
            "cpu": "Some CPU",
            "cpu_count": 2,
            "memory_gib": 8.0,
            "device": "cpu",
            "torch": "2.13.0",
            "transformers": "5.24.0",
            "kvassay": "0.1",
        },
        "commit": None,
        "protocol": {"free_tokens": 16, "block_size": 16, "seed": 0, "allow_beyond_native": False},
        "protection": {"sink": 4, "recent": 32},
        "arms": [asdict(info) for info in ARMS],
        "models": [{"name": "tiny-model"}],
        "planned_units": 2,
        "units": [],
        "trace_sets": [
            {
                **labels,
                "name": "kv_short",
                "length": 2048,
                "contexts": 2,
                "questions": 2,
                "query_aware": query_aware,
                "params": {},
                "floor": {"min_top1": 0.5, "max_nll": 1.8, "passed": True},
                "missing": list(found.missing),
            }
        ],
    }
    (folder / MANIFEST).write_text(dump_manifest(manifest), encoding="utf-8")
    return Results.open(folder) if finished else Results(folder, manifest, {}, ())
