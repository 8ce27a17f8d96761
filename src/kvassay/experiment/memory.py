"""What a run will take of each device's memory, said before it begins; `modelled`, never measured.

Counted are weights as they are loaded (float32), the dense context's keys and values as this harness holds them
(float32), what arms hold beside them, and workspace. An evicting or selecting arm shares the dense context's blocks
and owns little; one that quantises, factors or merges owns a copy of it, decoded; so does one that prefills by itself.
In main memory blocks cost what is written into them. A GPU gives the whole pool at once, room for every arm's own copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import psutil
from safetensors import SafetensorError, safe_open

from kvassay.cache.ops import group_specs
from kvassay.errors import DoesNotFit, LayoutError
from kvassay.experiment.asked import short_model
from kvassay.experiment.plan import Plan, TraceSet
from kvassay.layout.bytes import bytes_at
from kvassay.layout.config import cached, from_config
from kvassay.layout.groups import paged_part, plan_groups
from kvassay.layout.model import Layout
from kvassay.policy.card import Effect, Prefill
from kvassay.record.models import CATALOGUE, model_dir
from kvassay.replay.arms import Arm
from kvassay.replay.closed import pool_blocks

HELD = "float32"
"""What weights, keys and values are held in."""
ELEMENT = 4
COPYING = {Effect.QUANTIZE, Effect.LOW_RANK, Effect.MERGE}
"""Effects whose results are held beside the dense context."""
QUESTION = 256
"""Tokens that a question with its answer is taken to have."""
SCORED = 64
"""Answer tokens that an arm is taken to give: all arms' logits are held at once, float32; one arm's are compared."""
COMPARED = 4 * (1 + 3 * 2)
"""Bytes per logit of the arm compared: itself once more, and three such in float64 (dense's, its own, a product)."""
LIBRARIES = 1 << 30
"""Bytes that a process takes before it holds anything."""
FORKS, TIMED_FORKS = 2, 3
"""Copies of an arm's lane that live at the same time, in a replay and while it is timed (see `Replay`)."""
SCORING = 64
"""Queries whose attention over the context, logits and weights in float32, policies are taken to look at at once."""
ACTIVATIONS = 16
"""Hidden states' worth of activations that a chunk of prefill is taken to hold at once."""


@dataclass(frozen=True)
class Need:
    """Modelled bytes on one device, of the model and workload that take most."""

    device: str
    title: str
    """Which those are."""
    weights: int
    """0 if they are not here yet."""
    dense_kv: int
    """Of one context."""
    private: int
    """What arms hold beside it."""
    workspace: int
    """Logits, scores, activations, libraries; of a recording the rows that are about to be written."""
    available: int
    """Measured: free on the device now."""
    processes: int = 1
    """Each of which takes all of this."""

    @property
    def total(self) -> int:
        """Of all processes."""
        return (self.weights + self.dense_kv + self.private + self.workspace) * self.processes

    @property
    def line(self) -> str:
        """One line for people."""
        weights = _gib(self.weights) if self.weights else "not known yet"
        private = f" + arms' own blocks {_gib(self.private)}" if self.private else ""
        times = f" x {self.processes} processes" if self.processes > 1 else ""
        return (
            f"memory of {self.device}, modelled ({self.title}): weights {weights} + dense KV per context "
            f"{_gib(self.dense_kv)}{private} + workspace {_gib(self.workspace)}{times} "
            f"= {_gib(self.total)} of {_gib(self.available)} free"
        )

    def check(self) -> None:
        """`DoesNotFit` if this is more than is free."""
        if self.total > self.available:
            raise DoesNotFit(
                f"{self.device}: {self.total} bytes needed (modelled), {self.available} available, for {self.title}; "
                "take fewer arms, shorter contexts, fewer jobs or another device"
            )


def memory_plan(plan: Plan, jobs: int = 1) -> list[Need]:
    """What each device needs, main memory first; nothing for models whose configuration is not here yet.

    jobs: processes side by side, each with its own model and caches
    """
    needs = [need for trace_set in plan.trace_sets for need in _needs(plan, trace_set)]
    largest: dict[str, Need] = {}
    for need in needs:
        if need.device not in largest or need.total > largest[need.device].total:
            largest[need.device] = need
    return [replace(need, processes=jobs if need.device == "cpu" else 1) for need in largest.values()]


def recording_need(model: str, layout: Layout, context: int, chunk: int, device: str) -> Need:
    """What recording one context takes where the model is."""
    kv = bytes_at(layout, context, HELD).total
    weights, available = weight_bytes(model), available_bytes(device)
    workspace = kv + _activations(layout, chunk) + LIBRARIES  # rows on their way into the trace
    return Need(device, f"{short_model(model)}, {context} tokens", weights, kv, 0, workspace, available)


def weight_bytes(model: str) -> int:
    """Bytes of a model's weights in float32, by the headers of its files; 0 if they are not here."""
    folder = model_dir(model) if model in CATALOGUE else Path(model).expanduser()
    if not folder.is_dir() and (config := cached(model)) is not None:
        folder = config.parent
    return ELEMENT * sum(_elements(file) for file in sorted(folder.glob("*.safetensors"))) if folder.is_dir() else 0


def available_bytes(device: str) -> int:
    """Bytes that are free on a device now."""
    if device == "cpu":
        return int(psutil.virtual_memory().available)
    import torch

    return int(torch.cuda.mem_get_info(torch.device(device))[0])


def _needs(plan: Plan, trace_set: TraceSet) -> Iterator[Need]:
    model, context, device = trace_set.model, trace_set.workload.length, plan.experiment.experiment.device
    try:
        layout = from_config(model)
    except LayoutError:
        return  # not fetched yet: the run says so, or fetches it
    title = f"{short_model(model)}, {trace_set.label}"
    dense, weights = bytes_at(layout, context, HELD).total, weight_bytes(model)
    copies = sum(_owns_a_copy(arm) for arm in plan.arms)
    logits = SCORED * layout.vocab_size * (len(plan.arms) * ELEMENT + COMPARED)
    scoring = max(layer.q_heads for layer in layout.layers) * SCORING * context * 2 * ELEMENT
    activations = _activations(layout, plan.options.prefill_chunk)
    asked = len(plan.arms) * bytes_at(layout, QUESTION, HELD).total
    if device == "cpu":
        workspace = logits + scoring + activations + LIBRARIES
        yield Need("cpu", title, weights, dense, copies * dense + asked, workspace, available_bytes("cpu"))
        return
    # The model is read into main memory first; decoded copies of codes stay there.
    yield Need("cpu", title, weights, dense, copies * dense, logits + scoring + LIBRARIES, available_bytes("cpu"))
    pool = pool_bytes(layout, context, plan.arms, plan)
    yield Need(device, title, weights, dense, pool - dense, activations, available_bytes(device))


def pool_bytes(layout: Layout, context: int, arms: Sequence[Arm], plan: Plan) -> int:
    """Bytes of the block pool of a replay, which a GPU gives whole."""
    paged, size = paged_part(layout), plan.protocol.block_size
    forks = TIMED_FORKS if plan.experiment.latency.enabled else FORKS
    longest = QUESTION + plan.protocol.free_tokens
    blocks = pool_blocks(group_specs(paged, size), context, longest, forks * len(arms) + 2)
    return blocks * max(group.block_bytes for group in plan_groups(paged, size, HELD))


def _owns_a_copy(arm: Arm) -> bool:
    return arm.prefill is Prefill.OWN or bool(arm.policy.card.effects & COPYING)


def _activations(layout: Layout, chunk: int) -> int:
    return chunk * layout.hidden_size * ACTIVATIONS * ELEMENT


def _elements(file: Path) -> int:
    """Elements of all tensors in a safetensors file; 0 for one that loading will refuse."""
    try:
        with safe_open(file, "numpy") as tensors:
            names = tensors.keys()
            return sum(prod(tensors.get_slice(name).get_shape()) for name in names)
    except SafetensorError:
        return 0


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
