"""What policies report of their own decisions (shares, counts), each arm beside its control twins."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from kvassay.experiment.results import Results, SetResult
from kvassay.report import words
from kvassay.report.tables import Grid, Head, Line

MEANINGS = {
    "routed_share": "evicted tokens that find a kept one in their bucket to merge into / evicted tokens",
    "gate_mean": "mean cosine of the values of a token and the one it is routed to, negative ones as 0",
    "floored_targets": "merge targets whose window attention is below the floor, mean per layer (count)",
    "position_0_kept": "layers that keep the first token / layers",
    "keep_tokens": "tokens per KV head that the evicting part keeps, so that all fits into the bytes (count)",
}
"""Of the facts that built-in policies report; others are shown by name."""
TITLE = "What policies report of their decisions"
NOTE = "Mean over questions, as the policy gives it; an arm's control twins stand below it."


@dataclass(frozen=True)
class FactsTable:
    """All trace sets of a run; nothing if no policy reported anything."""

    results: Results

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render."""
        grids = fact_grids(self.results)
        if not grids:
            return
        yield Text()
        yield Text(TITLE, style="bold")
        yield Text(NOTE, style="dim")
        cards = Table.grid(padding=(0, 2))
        for head in dict.fromkeys(head for grid in grids for head in grid.heads if head.card):
            cards.add_row(Text(head.name, style="bold"), Text(head.card, style="dim"))
        yield cards
        for grid in grids:
            yield Text()
            yield Text(grid.title, style="bold")
            table = Table(box=None, padding=(0, 1, 0, 0))
            for number, head in enumerate(grid.heads):
                table.add_column(head.name, justify="right" if number else "left", overflow="fold")
            for line in grid.lines:
                table.add_row(*line.cells)
            yield table


def fact_grids(results: Results) -> list[Grid]:
    """A table per trace set in which a policy reported something."""
    columns = results.columns("model", "trace_set", "arm", "facts")
    if "facts" not in columns:
        return []
    reported: dict[tuple[str, str], dict[str, list[Mapping[str, float]]]] = {}
    for model, label, arm, facts in zip(*columns.values(), strict=True):
        if found := json.loads(facts):
            reported.setdefault((model, label), {}).setdefault(arm, []).append(found)
    sets = [(one, reported.get((one.model, one.label), {})) for one in results.sets]
    return [_grid(one, arms) for one, arms in sets if arms]


def _grid(found: SetResult, reported: Mapping[str, list[Mapping[str, float]]]) -> Grid:
    cells = {cell.arm: cell for cell in found.cells}
    ran = [arm for arm in cells if arm in reported]
    methods = list(dict.fromkeys(map(_method, ran)))
    order = sorted(ran, key=lambda arm: (methods.index(_method(arm)), ran.index(arm)))
    names = list(dict.fromkeys(name for arm in order for row in reported[arm] for name in row))
    lines = []
    for arm in order:
        values = [[row[name] for row in reported[arm] if name in row] for name in names]
        shown = [words.number(mean(one), 4) if one else "-" for one in values]
        quality = cells[arm].quality
        lines.append(Line((arm, *shown, words.spread(quality["top1"]), words.number(quality["kl"].mean))))
    heads = (
        Head("arm"),
        *(Head(name, MEANINGS.get(name, "")) for name in names),
        Head("top-1", "scored answer tokens ranked first; higher is better; for the pair's comparison"),
        Head("KL", "KL(dense || arm) in nats per scored answer token; lower is better"),
    )
    return Grid(f"{found.model}, {found.label}", heads, tuple(lines))


def _method(arm: str) -> str:
    """An arm's label without the twin's mark: what it shares with its twin."""
    return re.sub(r"~[\w-]+", "", arm)
