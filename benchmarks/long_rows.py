"""A layer of a long context under every policy that takes it: time of the policy's own work, its growth, peak memory.

    python benchmarks/long_rows.py --lengths 128k 1m
    python benchmarks/long_rows.py --row hy3 --lengths 128k 256k 512k 1m --policies snapkv quest
    python benchmarks/long_rows.py --heads 1 --repeats 5 --policies snapkv quest

Rows are synthetic, of the shape of one layer of `--row`. Each length runs in a process of its own, whose peak resident
size is measured. Times are CPU seconds of scoring, deciding, editing and summarising the whole context once, and of
choosing what one query reads; attention is not in them. The exponent is that of time against length.

With `--repeats` rows are drawn once and held, one pass over all policies warms up, and times are medians of so many
more. The process then keeps what memory it has had (glibc), so that no pass touches fresh pages, whose price is the
machine's and not the policy's; its peak is not that of a run.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvassay.experiment.long import growing_layers
from kvassay.experiment.tokens import parse_tokens, show_tokens
from kvassay.layout.config import from_config
from kvassay.layout.model import KV, Layer, Layout
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.registry import make
from kvassay.record.synthetic.rows import SyntheticLayer
from kvassay.record.synthetic.statistics import shipped
from kvassay.replay.arms import Arm
from kvassay.replay.heads import replay_heads
from kvassay.replay.limits import refusal
from kvassay.replay.protocol import Protocol
from kvassay.runtime import peak_rss_bytes

POLICIES = [
    *("dense", "random", "recency", "streaming", "snapkv", "tova", "keydiff", "knorm", "adakv-snapkv"),
    *("paged-eviction", "quest", "locks", "centroid", "exact_mass", "hindsight", "fp8", "int8", "kivi", "think"),
    *("h2o", "expected-attention", "r-kv", "nearest-merge"),
]
QUESTION = 1
"""Queries after the context: choosing is timed for one at a time, as a decoding engine asks."""
MOST = 1.1
"""Growth allowed to time, over that of the length."""
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""For glibc: nothing that is freed goes back to the system."""
Times = dict[str, tuple[float, float]]
"""By arm: seconds for the context, seconds per query."""


class Held:
    """The rows of a layer, drawn once: what is timed again is the policies' work alone."""

    def __init__(self, source: SyntheticLayer) -> None:
        self.layer, self.context = source.layer, source.context
        self.question, self.natural = source.question, source.natural
        self._source = source
        self._rows: dict[tuple[object, ...], Tensor] = {}

    def keys(self, head: int, first: int, count: int) -> Tensor:
        return self._held(self._source.keys, head)[first : first + count]

    def values(self, head: int, first: int, count: int) -> Tensor:
        return self._held(self._source.values, head)[first : first + count]

    def queries(self, head: int, first: int, count: int) -> Tensor:
        return self._drawn(self._source.queries, head, first, count)

    def aimed(self, head: int, first: int, count: int) -> Mapping[int, int]:
        return self._source.aimed(head, first, count)

    def _held(self, side: Callable[[int, int, int], Tensor], head: int) -> Tensor:
        return self._drawn(side, head, 0, self.context + self.question)

    def _drawn(self, side: Callable[[int, int, int], Tensor], *place: int) -> Tensor:
        if (side.__name__, *place) not in self._rows:
            self._rows[side.__name__, *place] = side(*place)
        return self._rows[side.__name__, *place]


def shape(row: str, heads: int | None) -> tuple[Layout, Layer]:
    """The middle growing layer of a model, or the first so many of its KV heads."""
    layout = from_config(row)
    growing = growing_layers(layout)
    layer = growing[len(growing) // 2]
    if heads is None:
        return layout, layer
    kv = layer.kv
    part = replace(layer.components[0], storage=KV(heads, kv.k_dim, kv.v_dim))
    return layout, replace(layer, q_heads=layer.group_size * heads, components=(part,))


def arms(names: Sequence[str], budget: float) -> list[Arm]:
    found = []
    for name in names:
        policy = make(name)
        units = [unit for unit in ("keep_tokens", "read_tokens") if unit in policy.card.budgets]
        found.append(Arm(policy, Budget(units[0], budget) if units else None, Protection(4, 32)))
    return found


def measured(
    row: str, heads: int | None, tokens: int, names: Sequence[str], budget: float, repeats: int
) -> tuple[Times, int]:
    torch.set_num_threads(1)
    layout, layer = shape(row, heads)
    depth = layer.index / max(1, len(layout.layers) - 1)
    drawn = SyntheticLayer(layer, shipped().at(depth), shipped().scale, context=tokens, question=QUESTION, seed=0)
    source = Held(drawn) if repeats else drawn
    wanted = [arm for arm in arms(names, budget) if refusal(arm, layer, tokens, QUESTION) is None]
    start = time.process_time()

    def say(message: str) -> None:
        print(f"  {show_tokens(tokens)} {message}, {time.process_time() - start:.0f} s of CPU", flush=True)

    passes = []
    for _ in range(1 + repeats):
        outcomes = replay_heads(source, layout, wanted, Protocol(), say, time.process_time)
        passes.append([(one.decide_seconds + one.summarize_seconds, one.select_seconds / QUESTION) for one in outcomes])
    say("done")
    counted = list(zip(*passes[1 if repeats else 0 :], strict=True))
    found = {}
    for arm, times in zip(wanted, counted, strict=True):
        context, query = (statistics.median(side) for side in zip(*times, strict=True))
        found[arm.label] = context, query if arm.policy.writes_read else 0.0
    return found, peak_rss_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="granite-4.1-8b")
    parser.add_argument("--heads", type=int, help="only the first so many KV heads")
    parser.add_argument("--lengths", type=parse_tokens, nargs="+", default=[1 << 17, 1 << 20])
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--repeats", type=int, default=0, help="counted passes after one that warms up")
    options = parser.parse_args()
    results: list[tuple[int, Times, int]] = []
    if options.repeats:
        os.environ.update(KEEP_MEMORY)  # read by the processes that measure
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for tokens in options.lengths:
            arguments = (options.row, options.heads, tokens, options.policies, options.budget, options.repeats)
            times, peak = pool.apply(measured, arguments)
            results.append((tokens, times, peak))
    layout, layer = shape(options.row, options.heads)
    kv = layer.kv
    for tokens, _, peak in results:
        size = tokens * kv.elements * layout.element_bytes / 2**30
        print(f"{show_tokens(tokens)}: peak {peak / 2**30:.2f} GiB resident; the layer in bf16 is {size:.2f} GiB")
    table(results)
    for arm in arms(options.policies, options.budget):
        if reason := refusal(arm, layer, options.lengths[-1], QUESTION):
            print(f"not run at {show_tokens(options.lengths[-1])}: {arm.label}: {reason}")


def table(results: Sequence[tuple[int, Times, int]]) -> None:
    lengths = [tokens for tokens, _, _ in results]
    most = MOST * lengths[-1] / lengths[0]
    print(f"\nratios of at most {most:.1f} pass")
    once, each = ([f"{what} at {show_tokens(n)}" for n in lengths] for what in ("context, s", "query, ms"))
    columns = ["arm", *once, "ratio", "exponent", *each, "ratio", "passes"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for arm in results[-1][1]:
        pairs = [times.get(arm, (math.nan, math.nan)) for _, times, _ in results]
        (first, query), (last, late) = pairs[0], pairs[-1]
        ratio = last / first if first else math.nan
        exponent = math.log(ratio) / math.log(lengths[-1] / lengths[0]) if ratio > 0 and len(lengths) > 1 else math.nan
        cells = [*(f"{one:.3f}" for one, _ in pairs), f"{ratio:.1f}", f"{exponent:.2f}"]
        grown = late / query if query else math.nan
        cells += [f"{1000 * one:.1f}" if one else "-" for _, one in pairs]
        cells += [f"{grown:.1f}" if query else "-", "no" if max(ratio, grown if query else 0.0) > most else "yes"]
        print(f"| {arm} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
