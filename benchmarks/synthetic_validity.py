"""Do synthetic rows order policies as recorded ones do? Kendall's tau over policies, by budget; published either way.

    python benchmarks/synthetic_validity.py statistics TRACE src/kvassay/record/synthetic/smollm2-135m.safetensors
    python benchmarks/synthetic_validity.py compare TRACE --out rows.parquet
    python benchmarks/synthetic_validity.py publish rows.parquet ...

TRACE is recorded with all its prompt queries (`kvassay record smollm2-135m --workload kv_short --context 8000
--q-tail 8000`); statistics and comparison take traces of different seeds. `compare` replays the same layers of the
trace and of a synthetic layer of that shape and length, head by head, and takes the mean output error over layers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvassay.experiment.records import read_records, write_records
from kvassay.layout.model import Layer
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.registry import make
from kvassay.record.synthetic import statistics as known
from kvassay.record.synthetic import validity
from kvassay.record.synthetic.measure import measure
from kvassay.record.synthetic.rows import SyntheticLayer
from kvassay.replay.arms import Arm
from kvassay.replay.heads import replay_heads
from kvassay.replay.onehead import LayerSource
from kvassay.replay.protocol import Protocol
from kvassay.replay.traced import TracedLayer
from kvassay.trace.reader import Trace

ROOT = Path(__file__).resolve().parent.parent
POLICIES = [
    *("random", "recency", "streaming", "snapkv", "tova", "keydiff", "knorm", "adakv-snapkv", "h2o"),
    *("expected-attention", "paged-eviction", "quest", "locks", "centroid", "exact_mass", "hindsight"),
]
BUDGETS = (0.1, 0.25, 0.5)
PARTS = (0.07, 0.24, 0.41, 0.59, 0.76, 0.93)
"""Relative depths of the layers measured and compared."""


@dataclass(frozen=True)
class Row:
    """One policy at one budget on one layer, recorded or synthetic."""

    model: str
    statistics: str
    tokens: int
    source: str
    layer: int
    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    policy: str
    budget: float
    output_error: float
    retained_mass: float


def chosen(trace: Trace, parts: Sequence[float]) -> list[Layer]:
    """Full layers of the trace at some relative depths."""
    full = [layer for layer in trace.layout.storing if layer.kind == "full"]
    return [full[round(part * (len(full) - 1))] for part in parts]


def arms() -> list[Arm]:
    found = []
    for name in POLICIES:
        policy = make(name)
        unit = "keep_tokens" if "keep_tokens" in policy.card.budgets else "read_tokens"
        found += [Arm(policy, Budget(unit, amount), Protection(4, 32)) for amount in BUDGETS]
    return found


def compare(trace: Trace, statistics: known.Statistics, parts: Sequence[float], question: int) -> list[Row]:
    rows: list[Row] = []
    depth = max(1, len(trace.layout.storing) - 1)
    for layer in dict.fromkeys(chosen(trace, parts)):
        drawn = SyntheticLayer(
            layer,
            statistics.at(trace.layout.storing.index(layer) / depth),
            statistics.scale,
            context=trace.prefix.tokens,
            question=question,
            seed=0,
        )
        sources: dict[str, LayerSource] = {
            "recorded": TracedLayer(trace, layer.index, trace.branches[0]),
            "synthetic": drawn,
        }
        for name, source in sources.items():
            start = time.process_time()
            for outcome in replay_heads(source, trace.layout, arms(), Protocol()):
                kv, budget = layer.kv, outcome.arm.budget
                assert budget is not None
                rows.append(
                    Row(
                        trace.header.model.name,
                        statistics.sha256,
                        trace.prefix.tokens,
                        name,
                        layer.index,
                        layer.q_heads,
                        kv.kv_heads,
                        kv.k_dim,
                        kv.v_dim,
                        outcome.arm.policy.card.name,
                        budget.amount,
                        outcome.deviation.output_error,
                        outcome.deviation.retained_mass,
                    )
                )
            print(
                f"layer {layer.index} {name}: {time.process_time() - start:.0f} s of CPU", file=sys.stderr, flush=True
            )
    return rows


def means(rows: Sequence[Row], source: str, budget: float) -> dict[str, float]:
    """Mean output error over layers, by policy."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if (row.source, row.budget) == (source, budget):
            found.setdefault(row.policy, []).append(row.output_error)
    return {policy: sum(errors) / len(errors) for policy, errors in found.items()}


def summary(rows: Sequence[Row]) -> validity.Comparison:
    first, taus = rows[0], {}
    policies = sorted({row.policy for row in rows})
    for budget in sorted({row.budget for row in rows}):
        recorded, drawn = (means(rows, source, budget) for source in ("recorded", "synthetic"))
        pairs = ([recorded[p] for p in policies], [drawn[p] for p in policies])
        taus[f"{budget:g}"] = validity.tau(*pairs)
    return validity.Comparison(
        first.statistics,
        first.model,
        first.q_heads,
        first.kv_heads,
        first.k_dim,
        first.v_dim,
        first.tokens,
        len(policies),
        taus,
    )


def page(files: Sequence[Sequence[Row]]) -> str:
    lines = [
        "# Do synthetic rows order policies as recorded ones do?",
        "",
        "Made by `benchmarks/synthetic_validity.py publish`; the rows are beside, in `synthetic-validity.parquet`.",
        "Kendall's tau-b of the policies' mean output error, recorded against synthetic rows of the same layer shape",
        f"and length. Synthetic rows judge where it is at least {validity.LEAST_TAU} at every budget; elsewhere, and "
        "for shapes",
        "that are not here, they carry bytes, traffic and time only.",
        "",
        "| model | tokens | heads | policies | " + " | ".join(f"tau, {b:g}" for b in BUDGETS) + " | may judge |",
        "|---|---|---|---|" + "---|" * (len(BUDGETS) + 1),
    ]
    for rows in files:
        one = summary(rows)
        taus = " | ".join(f"{one.tau[f'{b:g}']:.2f}" for b in BUDGETS)
        heads = f"{one.q_heads}/{one.kv_heads} x {one.k_dim}"
        answer = "yes" if one.agrees else "no"
        lines.append(f"| {one.model} | {one.tokens:,} | {heads} | {one.policies} | {taus} | {answer} |")
    for rows in files:
        one, layers = summary(rows), sorted({row.layer for row in rows})
        lines += ["", f"## {one.model}, {one.tokens:,} tokens, layers {', '.join(map(str, layers))}", ""]
        lines += ["Mean output error, recorded / synthetic.", ""]
        lines += ["| policy | " + " | ".join(f"{b:g}" for b in BUDGETS) + " |", "|---|" + "---|" * len(BUDGETS)]
        both = {b: (means(rows, "recorded", b), means(rows, "synthetic", b)) for b in BUDGETS}
        for policy in sorted(both[BUDGETS[0]][0], key=lambda name: both[BUDGETS[1]][0][name]):
            cells = [f"{both[b][0][policy]:.3f} / {both[b][1][policy]:.3f}" for b in BUDGETS]
            lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("statistics")
    verb.add_argument("trace", type=Path)
    verb.add_argument("out", type=Path)
    verb = verbs.add_parser("compare")
    verb.add_argument("trace", type=Path)
    verb.add_argument("--statistics", type=Path, help="default: those in the package")
    verb.add_argument("--parts", type=float, nargs="+", default=PARTS)
    verb.add_argument("--question", type=int, default=8)
    verb.add_argument("--out", type=Path, required=True)
    verb = verbs.add_parser("publish")
    verb.add_argument("rows", type=Path, nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.verb == "statistics":
        trace = Trace.open(options.trace)
        known.save(measure(trace, [layer.index for layer in chosen(trace, PARTS)]), options.out)
    elif options.verb == "compare":
        drawn_from = known.load(options.statistics) if options.statistics else known.shipped()
        rows = compare(Trace.open(options.trace), drawn_from, options.parts, options.question)
        write_records(rows, Row, options.out)
        print(summary(rows))
    else:
        files = [read_records(path, Row) for path in options.rows]
        validity.write([summary(rows) for rows in files], ROOT / "src/kvassay/record/synthetic" / validity.FILE)
        (ROOT / "docs/synthetic-validity.md").write_text(page(files), encoding="utf-8")
        write_records([row for rows in files for row in rows], Row, ROOT / "docs/synthetic-validity.parquet")


if __name__ == "__main__":
    main()
