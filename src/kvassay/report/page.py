"""What both forms of a report show, section by section, as plain data for their templates."""

from __future__ import annotations

from typing import Any

from kvassay.experiment.folder import RESOLVED
from kvassay.experiment.results import Results, SetResult, dump_manifest
from kvassay.measure.metrics import CARDS, RECLAIM_TEXT
from kvassay.measure.resample import LEVEL
from kvassay.measure.verdict import OUTCOME_TEXT, Judgement, load_judgement
from kvassay.report import acceptance, content, facts, tables, words
from kvassay.report.facts import fact_grids
from kvassay.report.flips import flips_of
from kvassay.report.layers import layer_grids
from kvassay.report.verdicts import cautions, gate_line
from kvassay.report.worst import NOTE, worst_cases


def page(results: Results) -> dict[str, Any]:
    """All sections of the report of a run."""
    judgement = load_judgement(results.path)
    return {
        "manifest": results.manifest,
        "cautions": [] if judgement is None else cautions(judgement, results.path),
        "verdicts": None if judgement is None else _verdicts(judgement),
        "no_gate": {"text": content.NO_GATE, "commands": content.NO_GATE_COMMANDS, "afterwards": content.AFTERWARDS},
        "findings": content.findings(results),
        "severities": content.SEVERITIES,
        "arms": list(results.arms.values()),
        "common": words.common(results),
        "machine": words.machine_line(results.manifest),
        "legend": words.legend(results.arms),
        "sets": [_set(found, results) for found in results.sets],
        "layers": layer_grids(results),
        "facts": fact_grids(results),
        "facts_about": (facts.TITLE, facts.NOTE),
        "states": tables.states_grid(results),
        "flips": [(model, label, arms) for (model, label), arms in flips_of(results).items()],
        "speculation": list(tables.speculation_grids(results)),
        "modes": acceptance.MODES,
        "cards": list(CARDS.values()),
        "reclaim": RECLAIM_TEXT,
        "level": f"{100 * LEVEL:.0f}%",
        "not_proved": content.not_proved(results),
        "provenance": content.provenance(results),
        "manifest_text": dump_manifest(results.manifest),
        "experiment_text": _text(results),
        "reference": words.REFERENCE,
        "reconstruction": words.RECONSTRUCTION,
    }


def _verdicts(judgement: Judgement) -> dict[str, Any]:
    """The verdicts that count, each with its checks by trace set."""
    return {
        "gate": gate_line(judgement),
        "judged": judgement.judged,
        "worst": worst_cases(judgement),
        "worst_note": NOTE,
        "lines": [
            {
                "arm": content.name_of(one),
                "outcome": one.outcome,
                "exploratory": one.exploratory,
                "reason": one.reason,
                "scope": one.scope,
                "checks": [
                    tables.plain(
                        f"{part.model}, {part.trace_set}: {part.line}",
                        content.CHECK_HEADS,
                        [content.check_line(check) for check in part.checks],
                    )
                    for part in judgement.of(one.arm)
                    if part.checks and not part.overall
                ],
            }
            for one in judgement.overall
        ],
        "meanings": {outcome: OUTCOME_TEXT[outcome] for outcome in judgement.count()},
        "excluded": judgement.excluded,
        "notes": judgement.notes,
    }


def _set(found: SetResult, results: Results) -> dict[str, Any]:
    """One model on one workload."""
    return {
        "model": found.model,
        "label": found.label,
        "caption": words.caption(found),
        "warnings": words.limits(found),
        "parts": [
            (part.title, part.note, tables.set_grids(found, part, results)) for part in words.parts(found, results.arms)
        ],
    }


def _text(results: Results) -> str:
    """The experiment file with every default, if the folder has it."""
    file = results.path / RESOLVED
    return file.read_text(encoding="utf-8") if file.is_file() else ""
