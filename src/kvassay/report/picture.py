"""One picture of a run for a README: what each policy holds, reads and frees, for each model."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from kvassay.errors import ExperimentError
from kvassay.experiment.folder import os_errors
from kvassay.experiment.results import Results
from kvassay.report import figures, words

KINDS = (".png", ".svg", ".pdf")


def write_picture(results: Results, path: str | Path) -> Path:
    """Draw the first trace set of each model to `path`; its suffix is the format (.png, .svg or .pdf)."""
    target = Path(path)
    if target.suffix not in KINDS:
        raise ExperimentError(f"{target}: a picture is written as {', '.join(KINDS)}")
    firsts = [sets[0] for _, sets in words.models(results)]
    with figures.style(), os_errors(target):
        tall = 3.8 * len(firsts) + 0.4
        figure = Figure(figsize=(15, tall), layout="constrained", facecolor="white")
        grid = figure.subplots(len(firsts), 3, squeeze=False)
        for row, found in zip(grid, firsts, strict=True):
            figures.draw_quality(row[0], found, results.arms, figures.retained, "bytes held, of dense")
            figures.draw_quality(row[1], found, results.arms, figures.read, "KV bytes read per token, of dense")
            figures.draw_freed(row[2], found, results.arms)
            row[0].set_title(f"{found.model}: {found.label}", loc="left", fontweight="bold")
        grid[0][2].legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3, fontsize=8)
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=7, fontsize=8)
        figure.savefig(target, dpi=120, facecolor="white")
    return target
