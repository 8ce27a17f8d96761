"""The columns of the result files as one Markdown page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvassay.errors import ExperimentError, did_you_mean
from kvassay.experiment.columns import FileCard
from kvassay.measure.columns import ColumnCard

HEAD = """# Result files

Generated from the records' docstrings and the metric cards by `kvassay columns --markdown`; do not edit.
`schema.json` in a run folder says the same for programs.

- **better**: which way is better; `-` where neither is, or the column is a name.
- **how**: `measured` here, `modelled` by formulas, or `given`: a name, a setting, a property of the text.
- **denominator**: what the number is divided by or a mean of; empty for plain amounts.
- A null says that there is no such number; no column holds 0 for it.
"""
FIELDS = ("column", "type", "unit", "denominator", "better", "how", "meaning")


def markdown(files: Iterable[FileCard]) -> str:
    """The page."""
    return "\n".join([HEAD, *(part for file in files for part in _file(file))])


def lines(files: Iterable[FileCard], name: str | None = None) -> Iterator[str]:
    """A line per column; with a `name` that column alone, in every file that has it, and what it means.

    Raises `ExperimentError` if no file has it.
    """
    found = [(file, column) for file in files for column in file.columns]
    known = {column.name for _, column in found}
    if name is not None and name not in known:
        raise ExperimentError(f"no column is called '{name}'{did_you_mean(name, known)}")
    for file, column in found:
        if name in (None, column.name):
            facts = [column.unit, f"over {column.denominator}" if column.denominator else "", column.how]
            yield f"{file.name}  {column.name}  ({'; '.join(filter(None, facts))})"
            if name is not None:
                better = "no direction" if column.better == "none" else f"{column.better} is better"
                yield f"  {column.meaning} [{column.type}; {better}]"


def _file(file: FileCard) -> list[str]:
    rows = [_row(column) for column in file.columns]
    head = [f"| {' | '.join(FIELDS)} |", "|" + "---|" * len(FIELDS)]
    return [f"## {file.name}", "", f"One row: {file.row}.", "", *head, *rows, ""]


def _row(column: ColumnCard) -> str:
    better = "-" if column.better == "none" else column.better
    cells = (f"`{column.name}`", column.type, column.unit, column.denominator, better, column.how, column.meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
