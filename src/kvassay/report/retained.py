"""Where in the context each arm holds what it holds, mean over the contexts of a trace set."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvassay.experiment.results import Results

DIGITS = 3
ALL = 0.9995
"""An arm that holds at least this much everywhere evicts nothing."""


def kept_rows(results: Results) -> list[dict[str, Any]]:
    """One row per trace set and evicting arm: `share` by stretch of positions. None of a run that did not record it.

    Contexts of a set with another number of stretches than its first are left out.
    """
    columns = results.columns("model", "trace_set", "arm", "kept")
    if "kept" not in columns:
        return []
    found: dict[tuple[str, str, str], list[list[float]]] = {}
    for model, label, arm, kept in zip(*columns.values(), strict=True):
        if kept:
            found.setdefault((model, label, arm), []).append(kept)
    order = [(one.model, one.label, cell.arm) for one in results.sets for cell in one.cells]
    rows = []
    for key in order:
        kept = [one for one in found.get(key, []) if len(one) == len(found[key][0])]
        if kept and np.min(share := np.mean(kept, axis=0)) < ALL:
            rows.append(dict(zip(("model", "set", "arm"), key, strict=True)) | {"share": share.round(DIGITS).tolist()})
    return rows
