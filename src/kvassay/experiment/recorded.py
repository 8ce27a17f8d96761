"""What reports need of a recorded context: the answers that were right, and the model's layout. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvassay.errors import ExperimentError, KvassayError
from kvassay.layout.model import Layout
from kvassay.layout.serialize import layout_from_dict

HEADER = "trace.json"


@dataclass(frozen=True)
class Recorded:
    """One context."""

    layout: Layout
    answers: tuple[str, ...]
    """The recorded answer to each question."""


def read_recorded(folder: Path) -> Recorded | None:
    """Read it off a trace folder; None if the trace is not there any more. `ExperimentError` if it is damaged."""
    file = folder / HEADER
    if not file.is_file():
        return None
    try:
        header = json.loads(file.read_text(encoding="utf-8"))
        answers = tuple(branch["answer_text"] for branch in header["branches"])
        return Recorded(layout_from_dict(header["layout"]), answers)
    except (OSError, ValueError, KeyError, TypeError, KvassayError) as error:
        raise ExperimentError(f"{file}: cannot be read as a trace: {error}") from None
