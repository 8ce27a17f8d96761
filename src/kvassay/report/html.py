"""The run as one HTML file that needs nothing else: figures inline, tables, metric cards, provenance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from kvassay.experiment.arminfo import ArmInfo
from kvassay.experiment.folder import REPORT, RunFolder
from kvassay.experiment.results import Results, SetResult, dump_manifest
from kvassay.measure.aggregate import Cell
from kvassay.measure.metrics import CARDS, RECLAIM_TEXT
from kvassay.measure.result import RECLAIM_MODES
from kvassay.report import figures, words

TEMPLATE = "report.html.j2"
QUALITY_COLUMNS = ("top1", "task", "nll", "kl", "agree")


def write_html(results: Results) -> Path:
    """Write `report.html` into the run folder and return its path; `ExperimentError` if it cannot be written."""
    folder = RunFolder(results.path)
    target = folder.path / REPORT
    folder.write_text(target, render(results))
    return target


def render(results: Results) -> str:
    """The page as text."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    with figures.style():
        sets = [_set(number, found, results) for number, found in enumerate(results.sets)]
    return environment.get_template(TEMPLATE).render(
        manifest=results.manifest,
        arms=results.arms.values(),
        sets=sets,
        common=words.common(results),
        machine=words.machine_line(results.manifest),
        legend=words.legend(results.arms),
        cards=list(CARDS.values()),
        provenance=dump_manifest(results.manifest),
        reclaim=RECLAIM_TEXT,
        modes=RECLAIM_MODES,
        reference=words.REFERENCE,
        reconstruction=words.RECONSTRUCTION,
    )


def _set(number: int, found: SetResult, results: Results) -> dict[str, Any]:
    """One model on one workload, ready for the template."""
    arms = results.arms
    about = f"{found.model}, {found.label}"
    drawn = [
        (f"Quality over bytes held: {about}", figures.quality_figure(found, arms, figures.retained, "bytes held")),
        (f"Quality over read traffic: {about}", figures.quality_figure(found, arms, figures.read, "KV bytes read")),
        (f"Blocks freed by way of reclaiming: {about}", figures.freed_figure(found, arms)),
    ]
    return {
        "model": found.model,
        "caption": words.caption(found),
        "warnings": words.warnings(found),
        "figures": [
            (title, figures.inline_svg(figure, f"s{number}f{place}", title))
            for place, (title, figure) in enumerate(drawn)
        ],
        "parts": [
            (part.title, part.note, [_row(cell, arms) for cell in part.cells]) for part in words.parts(found, arms)
        ],
    }


def _row(cell: Cell, arms: Mapping[str, ArmInfo]) -> dict[str, Any]:
    info = arms[cell.arm]
    return {
        "name": words.arm_name(cell, arms),
        "kind": "reference" if info.reference else "shared" if info.always_on else "candidate",
        "quality": [words.interval(cell.quality[name]) for name in QUALITY_COLUMNS],
        "difference": words.interval(cell.difference.get("top1")),
        "flips": words.flipped(cell),
        "worst": words.number(cell.worst_decile_nll),
        "diverged": f"{cell.diverged}/{cell.samples}",
        "held": words.size(cell.amounts["retained_bytes"]),
        "whole": words.percent(cell.amounts["retained_fraction"]),
        "scope": words.percent(cell.amounts["retained_fraction_scope"]),
        "peak": words.size(cell.peak_bytes),
        "selected": words.number(cell.amounts["selected_tokens"], 0),
        "read": words.size(cell.amounts["read_bytes"]),
        "read_fraction": words.percent(cell.amounts["read_fraction"]),
        "total": words.blocks(cell.amounts["blocks_total"]),
        "freed": [words.blocks(cell.blocks_freed.get(mode)) for mode in RECLAIM_MODES],
        "policy_bytes": words.size(cell.amounts["policy_bytes"]),
        "policy_seconds": words.number(cell.amounts["policy_seconds"], 2),
    }
