"""Attention error by layer and head, from the open-loop screening of a run: mean over the questions screened."""

from __future__ import annotations

import numpy as np

from kvassay.experiment.results import Results
from kvassay.measure.fidelity import screen
from kvassay.measure.result import LayerFidelity
from kvassay.report import words
from kvassay.report.points import Row, rounded
from kvassay.report.tables import Grid, Head, Line

HEADS = (
    Head("arm"),
    Head("error", "||arm - dense|| / ||dense|| of the attention output, mean over layers; lower is better; measured"),
    Head("worst layer's error", "the largest of the layers' means; lower is better; measured"),
    Head("worst layer"),
    Head("mass", "share of dense's attention mass on the tokens the arm may read; higher is better; measured"),
    Head("least layer's mass", "the smallest of the layers' means; higher is better; measured"),
    Head("least layer"),
)


def layer_rows(results: Results) -> list[Row]:
    """One row per trace set, arm and layer the arm may act on: error, mass, and the error of each query head.

    Dense, whose error is 0, is left out.
    """
    grouped: dict[tuple[str, str, str, int], list[LayerFidelity]] = {}
    for place, rows in _by_set(results).items():
        for row in rows:
            if row.in_scope and row.arm != "dense":
                grouped.setdefault((*place, row.arm, row.layer), []).append(row)
    return [
        {
            **dict(zip(("model", "set", "arm", "layer"), key, strict=True)),
            "error": rounded(float(np.mean([row.output_error for row in rows]))),
            "mass": rounded(float(np.mean([row.retained_mass for row in rows]))),
            "heads": [rounded(value) for value in np.mean([row.head_errors for row in rows], axis=0).tolist()],
        }
        for key, rows in grouped.items()
    ]


def layer_grids(results: Results) -> list[Grid]:
    """Mean and worst layer of each arm, a table per trace set screened."""
    return [
        Grid(
            f"{model}, {label}: {rows[0].trace}",
            HEADS,
            tuple(
                Line((
                    line.arm, words.number(line.output_error, 4), words.number(line.worst_error, 4),
                    str(line.worst_layer), words.number(line.retained_mass, 4), words.number(line.least_mass, 4),
                    str(line.least_layer),
                ))
                for line in screen(rows)
            ),
        )
        for (model, label), rows in _by_set(results).items()
        if rows
    ]  # fmt: skip


def _by_set(results: Results) -> dict[tuple[str, str], list[LayerFidelity]]:
    return {
        place: [row for row in results.fidelity if row.trace == trace]
        for place, trace in results.first_traces().items()
    }
