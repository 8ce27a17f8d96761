"""`checks.json`: findings of a run by trace set, as people and gates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from kvassay.errors import ExperimentError
from kvassay.measure.checks import Finding

By = tuple[str, str]
"""(model, trace set)."""


def dump_findings(found: Mapping[By, Sequence[Finding]]) -> str:
    """Findings by (model, trace set) as the text of `checks.json`."""
    sets = [
        {"model": model, "trace_set": label, "findings": [asdict(finding) for finding in findings]}
        for (model, label), findings in found.items()
    ]
    return json.dumps({"schema": 1, "sets": sets}, indent=1, ensure_ascii=False) + "\n"


def load_findings(file: Path) -> dict[By, tuple[Finding, ...]]:
    """Findings by (model, trace set); none if there is no such file. `ExperimentError` if it is damaged."""
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return {
            (item["model"], item["trace_set"]): tuple(
                Finding(**{**finding, "among": tuple(finding["among"])}) for finding in item["findings"]
            )
            for item in data["sets"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExperimentError(f"{file}: cannot be read as findings: {error}") from None
