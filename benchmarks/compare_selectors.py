"""Selectors side by side at equal read bytes: LOCKS, Quest, the centroid control, MiniMax-M3's rule with both scorers.

    python benchmarks/compare_selectors.py [--traces FOLDER] [--context 4096] [--models smollm2-135m ...] [--tokens]

Open loop on recorded traces of both embedded models: what a selection costs the attention output, not an answer. Blocks
of 16 tokens, and of 128 with the side data of whole 128-token blocks. Every full-attention layer is sparse, no token is
protected beyond what a method forces itself, and there is one list per KV head, so that the choice alone differs.

A query may read as many bytes of a layer as `budget` tokens' keys and values take, and the scan of the side data comes
out of them; a dash says that it leaves less than a method needs. With --tokens the scan comes on top, as in papers.
References (*) scan every key to choose; their scan is in no budget. Every other scan is all of the side data, so it is
also what memory rises by.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from selector_traces import MODELS, Pair, pairs

from kvassay.layout.model import Layer
from kvassay.measure.result import LayerFidelity
from kvassay.policy.blocks import BlockSelector
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.registry import parse
from kvassay.policy.views import BlockView
from kvassay.replay.arms import Arm
from kvassay.replay.calibration import fitting_once
from kvassay.replay.open import open_loop
from kvassay.replay.protocol import Protocol

BUDGETS = (2048, 1024, 512, 256, 128)
BLOCKS = (16, 128)
POLICIES = (
    "locks(block={block})",
    "quest(block={block}, dense_layers=0)",
    "centroid(block={block})",
    "m3-distilled(block={block}, dense_layers=0)",
    "m3-exact-mass(block={block}, dense_layers=0)",
    "m3-exact-mass(block={block}, dense_layers=0, pool=sum)",
)


class Cell(NamedTuple):
    """One policy at one budget: means over layers, in scope; bytes of one query, all these layers together."""

    error: float
    mass: float
    read: float
    scanned: float
    dense: float

    @classmethod
    def of(cls, rows: list[LayerFidelity]) -> Cell:
        n = len(rows)
        return cls(
            sum(row.output_error for row in rows) / n,
            sum(row.retained_mass for row in rows) / n,
            sum(row.read_bytes for row in rows),
            sum(row.scan_bytes for row in rows),
            sum(row.dense_bytes for row in rows),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="keep the traces here, or find them")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--tokens", action="store_true", help="equal tokens, the scan on top")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, fitting_once():
        for pair in pairs(options.traces or Path(scratch), options.context, models=tuple(options.models)):
            for block in BLOCKS:
                compare(pair, block, options.tokens)


def compare(pair: Pair, block: int, equal_tokens: bool) -> None:
    """Replay all policies at all budgets and print one table."""
    layer = next(layer for layer in pair.test.layout.layers if layer.window is None)
    arms: dict[tuple[str, int], Arm] = {}
    for text in POLICIES:
        policy = parse(text.format(block=block))
        assert isinstance(policy, BlockSelector)
        scan = 0.0 if equal_tokens else scan_tokens(policy, layer, block, pair.test.prefix.tokens)
        for budget in BUDGETS:
            tokens = int(budget - scan) // block * block
            if tokens // block > sum(policy.forced_ends):
                arms[policy.label, budget] = Arm(policy, Budget("read_tokens", tokens), Protection(0, 0))
    by_label = {arm.label: arm for arm in arms.values()}  # budgets may come to the same arm
    rows = open_loop(pair.test, list(by_label.values()), Protocol(block_size=block), calibration=pair.calibration)
    found = {label: Cell.of([row for row in rows if row.arm == label and row.in_scope]) for label in by_label}
    what = "equal tokens, scan on top" if equal_tokens else "equal read bytes, scan inside"
    Console(width=140).print(
        table(
            f"{pair.model}, {pair.test.prefix.tokens} tokens, blocks of {block}: {what}",
            {place: found[arm.label] for place, arm in arms.items()},
            arms,
        )
    )


def scan_tokens(policy: BlockSelector, layer: Layer, block: int, context: int) -> float:
    """What a query scans of a layer, in tokens' keys and values; 0 for a reference, whose scan is in no budget."""
    if policy.card.reference:
        return 0.0
    kv = layer.kv
    rows = torch.ones(1, kv.kv_heads, block, kv.k_dim)
    learnt = {f"layer{layer.index}.key": torch.ones(policy.parameters.get("index_dim", 1), kv.kv_heads * kv.k_dim)}
    side = sum(t.nbytes for t in policy.summarize(BlockView(layer, rows, rows, learnt)).values())
    return side * (context // block) / (2 * kv.kv_heads * (kv.k_dim + kv.v_dim))


def table(title: str, cells: dict[tuple[str, int], Cell], arms: dict[tuple[str, int], Arm]) -> Table:
    """Policies by budgets: output error, retained mass, tokens read per KV head."""
    caption = "each cell: output error, retained mass, tokens read per KV head; scan: of what dense reads"
    made = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    made.add_column("policy")
    for budget in BUDGETS:
        made.add_column(str(budget), justify="right")
    made.add_column("scan", justify="right")
    for label in dict.fromkeys(label for label, _ in cells):
        mine = {budget: cells[label, budget] for budget in BUDGETS if (label, budget) in cells}
        some, arm = next(iter(mine.values())), next(arms[label, budget] for budget in mine)
        made.add_row(
            label.split("(")[0] + (" sum" if "pool=sum" in label else "") + ("*" if arm.policy.card.reference else ""),
            *(show(mine[b], arms[label, b]) if b in mine else "-" for b in BUDGETS),
            f"{some.scanned / some.dense:.1%}",
        )
    return made


def show(cell: Cell, arm: Arm) -> str:
    assert arm.budget is not None
    return f"{cell.error:.3f} {cell.mass:.3f} {arm.budget.amount:4.0f}"


if __name__ == "__main__":
    main()
