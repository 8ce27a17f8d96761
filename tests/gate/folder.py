"""A run folder of hand-made evidence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kvassay.experiment.folder import CELLS, MANIFEST, SAMPLES
from kvassay.experiment.results import Results, dump_manifest
from kvassay.experiment.rows import write_cells, write_samples
from kvassay.gate.evidence import SetEvidence
from tests.gate.made import ARMS, everywhere
from tests.runs import make_run

STARTED = "2026-01-02T03:04:05+00:00"


def write_run(folder: Path, sets: Sequence[SetEvidence] | None = None) -> Results:
    """The manifest is that of `tests.runs` with these arms and trace sets; it began at `STARTED`."""
    sets = everywhere() if sets is None else sets
    make_run(folder)
    named = [({"model": item.found.model, "trace_set": item.found.label}, item) for item in sets]
    write_samples([(labels, item.rows) for labels, item in named], folder / SAMPLES)
    write_cells([(labels, item.found.cells) for labels, item in named], folder / CELLS)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["arms"] = [asdict(info) for info in ARMS.values()]
    manifest["trace_sets"] = [
        {
            **labels,
            "name": item.found.workload,
            "length": item.found.length,
            "contexts": item.found.contexts,
            "questions": item.found.questions,
            "query_aware": item.found.query_aware,
            "params": {},
            "floor": item.found.floor,
            "missing": list(item.found.missing),
        }
        for labels, item in named
    ]
    assert manifest["started"] == STARTED
    (folder / MANIFEST).write_text(dump_manifest(manifest), encoding="utf-8")
    return Results.open(folder)
