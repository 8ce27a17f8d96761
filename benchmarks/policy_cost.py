"""What every policy's own work on one layer costs, by length: CPU seconds, growth, and peak memory beyond the cache.

    python benchmarks/policy_cost.py [--lengths 8k 32k 128k] [--policies snapkv ...] [--threads 1]

One layer of 8 KV heads x 128 under 32 query heads, random rows in float32, a budget of a tenth of the context; a
process per policy. `plan` is what a policy does once per context: scores and decision, or the summaries of
all blocks. `step` is what it does per later token at that length: choosing what to read, or deciding (a method that
acts every n tokens: in one such step). Growth is the exponent of seconds in tokens, a least-squares line in logarithms;
seconds below a hundredth are too few to say. Memory is the peak resident size beyond keys, values and recorded
evidence, at the longest length.

Methods whose work is quadratic are measured at a sixteenth of each length, and their seconds at every length are
extrapolated (~) by the growth found: above the stated length (x) they are refused, as is what needs every prompt query.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from kvassay.cli.params import TokenCount
from kvassay.errors import KvassayError
from kvassay.measure.plan_cost import PlanCost, Shape, plan_cost
from kvassay.policy.card import Effect
from kvassay.policy.checks import LONGEST_QUADRATIC, too_long
from kvassay.policy.registry import BUILT_IN, get, parse

SHORTER = 16
LEAST = 0.01
MIB = 1 << 20
LAW = 2048


def main() -> None:
    arguments = _arguments()
    if arguments.one:
        torch.set_num_threads(arguments.threads)
        try:
            print(json.dumps([asdict(plan_cost(parse(arguments.one), length)) for length in arguments.lengths]))
        except KvassayError as error:
            print(json.dumps(str(error)))
        return
    table = Table(
        "policy", *(f"{n // 1024}K plan s" for n in arguments.lengths), "growth", "step ms", "growth", "MiB", ""
    )
    for name in arguments.policies:
        row = _row(name, arguments)
        table.add_row(name, *row)
        print(name, *row, sep=" | ", file=sys.stderr)
    Console(width=150).print(table)


def _row(name: str, arguments: argparse.Namespace) -> list[str]:
    policy = parse(name)
    quadratic = policy.compares_tokens
    run = [n for n in arguments.lengths if quadratic or too_long(policy, Shape().layer(), n) is None]
    lengths = [n // SHORTER if quadratic else n for n in run]
    done = _measured(name, lengths, arguments.threads)
    if isinstance(done, str):
        return [*("" for _ in lengths), "", "", "", "", done]
    plan, step = ([getattr(cost, side) for cost in done] for side in ("plan_seconds", "step_seconds"))
    shown = [f"{seconds:.2f}" for seconds in plan] + ["x"] * (len(arguments.lengths) - len(run))
    note = "" if len(run) == len(arguments.lengths) else f"x above {LONGEST_QUADRATIC // 1024}K"
    if quadratic:
        growth = _growth(lengths, plan)
        assert growth is not None
        shown = [f"~{plan[-1] * (n / lengths[-1]) ** growth:.0f}" for n in arguments.lengths]
        note = f"measured up to {lengths[-1] // 1024}K, memory too; x above {LONGEST_QUADRATIC // 1024}K"
    peak = max(cost.peak_bytes for cost in done) / MIB
    note += " over 2 GiB!" if peak > LAW and not quadratic else ""
    return [
        *shown,
        _text(_growth(lengths, plan)),
        f"{1000 * step[-1]:.1f}",
        _text(_growth(lengths, step)),
        f"{peak:.0f}",
        note,
    ]


def _growth(lengths: list[int], seconds: list[float]) -> float | None:
    used = [(n, s) for n, s in zip(lengths, seconds, strict=True) if s >= LEAST]
    if len(used) < 2:
        return None
    return float(np.polyfit(np.log([n for n, _ in used]), np.log([s for _, s in used]), 1)[0])


def _text(growth: float | None) -> str:
    return "-" if growth is None else f"{growth:.2f}"


def _measured(name: str, lengths: list[int], threads: int) -> list[PlanCost] | str:
    """Costs by length, from a process of the policy's own; or why there are none."""
    texts = list(map(str, lengths))
    command = [sys.executable, __file__, "--one", name, "--threads", str(threads), "--lengths", *texts]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])
    return found if isinstance(found, str) else [PlanCost(**one) for one in found]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    count = TokenCount()
    parser.add_argument(
        "--lengths", nargs="+", type=lambda text: count.convert(text, None, None), default=[8192, 32768, 131072]
    )
    acting = [name for name in BUILT_IN if get(name).card.effects != {Effect.NONE} and not get(name).card.external]
    parser.add_argument("--policies", nargs="+", default=acting)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
