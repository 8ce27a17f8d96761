"""The screening table: attention-output error and retained mass of every arm, mean and worst layer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvassay.experiment.screen import Screening
from kvassay.policy.card import Card

NOTES = (
    "error: ||arm - dense|| / ||dense|| of the attention output on the recorded queries; lower is better",
    "mass: share of dense's attention mass on the tokens the arm may read; higher is better",
    "read: bytes the queries read (K, V, side data, metadata, scoring scan) / dense's; lower is better",
    "means and worst layers are over the layers an arm may act on; errors do not add up over layers here",
)


def fidelity_tables(found: Screening) -> Group:
    """The table, what its columns mean, and which arms were left out."""
    header = found.trace.header
    what = f"{found.trace.path.name}: {header.model.name}, {header.recipe.name}, {header.prefix.tokens} tokens"
    table = Table(title=f"{what}, branches: {len(header.branches)}, open loop", title_justify="left")
    table.add_column("arm", overflow="fold")
    for head in ("error", "worst", "layer", "mass", "least", "layer", "read", "layers"):
        table.add_column(head, justify="right")
    table.add_column("kind")
    for arm, line in zip(found.arms, found.lines, strict=True):
        table.add_row(
            Text(line.arm),
            f"{line.output_error:.4f}",
            f"{line.worst_error:.4f}",
            str(line.worst_layer),
            f"{line.retained_mass:.4f}",
            f"{line.least_mass:.4f}",
            str(line.least_layer),
            f"{line.read_fraction:.3f}",
            str(line.layers),
            kind(arm.policy.card),
        )
    notes = [*NOTES, _reproduced(found), *(f"not replayed: {arm}: {why}" for arm, why in found.skipped.items())]
    return Group(table, *(Text(note) for note in notes))


def kind(card: Card) -> str:
    """What sets an arm apart from exact candidates: a yardstick, or one that approximates what it keeps."""
    if card.reference:
        return "reference"
    return "" if card.exact else "approximates " + ", ".join(sorted(card.approximates))


def fidelity_data(found: Screening) -> dict[str, Any]:
    """The same as plain data, with every row."""
    return {
        "trace": str(found.trace.path),
        "digest": found.trace.digest,
        "dense_reproduces_output": found.reproduced,
        "arms": [
            {**asdict(line), "kind": kind(arm.policy.card)} for arm, line in zip(found.arms, found.lines, strict=True)
        ],
        "skipped": found.skipped,
        "layers": [asdict(row) for row in found.rows],
    }


def _reproduced(found: Screening) -> str:
    if found.reproduced is None:
        return "dense was not compared with the model's own attention: record with --tap output to have that"
    return f"dense is within {found.reproduced:.1e} of the model's own attention output (part of its peak)"
