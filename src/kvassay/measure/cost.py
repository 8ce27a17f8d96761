"""Modelled decode time: a roofline per layer component, from a model's layout and a hardware file.

A component takes the larger of its bytes over the bandwidth and its operations over the matrix rate, both as
achievable; components run one after the other. What is counted: reading K and V (or latents, pooled entries),
scanning index keys, QK and PV products, and the weights if their number is given. What is not: launches,
communication between devices, sampling, the indexer's own products (they stay below its bytes on all shipped
hardware), and what a policy writes. Everything here is `modelled`; `calibrate` says how far it is from measured times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Literal

from kvassay.errors import HardwareError
from kvassay.layout.bytes import bytes_at, index_elements, kind_of, states_of
from kvassay.layout.model import KV, Component, Latent, Layout, Pooled, TopK, dtype_bytes
from kvassay.measure.hardware.files import Hardware

KINDS = ("full", "sliding", "latent", "pooled", "index", "weights")
"""Parts of a decode step, never added up without being shown apart."""


@dataclass(frozen=True)
class Work:
    """What one component of one layer does to decode one token of one request."""

    layer: int
    """The layer that stores what is read; a layer that only reads another's cache works on that layer."""
    kind: str
    bytes: float
    flops: float
    """Floating-point operations of QK and PV, a multiply-add being two."""


@dataclass(frozen=True)
class Weights:
    """Weights that every step reads once, whatever the batch."""

    parameters: float
    """How many take part in one token: of a mixture of experts, the active ones."""
    dtype: str = "bfloat16"
    source: str = "given"
    """Where the number is from."""

    @property
    def bytes(self) -> float:
        """Bytes read per step."""
        return self.parameters * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class StepCost:
    """One decode step of a batch: each request gets one token. Seconds, modelled."""

    parts: Mapping[str, float]
    """Seconds by kind (`KINDS`), only those that occur."""
    memory_bound: float
    """Share of the time in components that wait for memory, 0 to 1."""
    held_bytes: float
    """Cache of all requests, and the weights."""
    fits: bool
    """Whether `held_bytes` fit the hardware's memory."""

    @property
    def seconds(self) -> float:
        """All parts, one after the other."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class CostResult:
    """Modelled decode time of one arm on one hardware, with the cache that the run measured."""

    model: str
    trace_set: str
    arm: str
    hardware: str
    """Name of the hardware file."""
    batch: int
    """Requests decoding together, all of this context."""
    context_tokens: int
    seconds_per_token: float
    """Attention of one decode step, all layers, every request gets one token, seconds; lower is better."""
    dense_seconds_per_token: float
    """The same for dense."""
    calibration_error: float | None = None
    """|modelled / measured - 1| of this arm's attention time on that very hardware, the scale being fitted on the
    other arms; None: not calibrated, nothing was measured there."""
    how: Literal["modelled"] = "modelled"

    @property
    def fraction(self) -> float:
        """Of dense's time; lower is better."""
        return self.seconds_per_token / self.dense_seconds_per_token


def decode_work(layout: Layout, context: int, kv_dtype: str | None = None) -> list[Work]:
    """What decoding one token with `context` tokens in the cache reads and computes, component by component.

    kv_dtype: element dtype of the cache; the layout's own if not given
    """
    width = dtype_bytes(kv_dtype or layout.kv_dtype)
    work = []
    for layer in layout.layers:
        owner = layout.source(layer.index)
        for component in owner.components:
            states = states_of(component, context)
            read = min(states, _selectable(component))
            flops = 2.0 * layer.q_heads * read * _products(component)
            work.append(Work(owner.index, kind_of(component), read * component.storage.elements * width, flops))
            if component.index is not None:
                work.append(Work(owner.index, "index", states * index_elements(component) * width, 0.0))
    return work


def _selectable(component: Component) -> float:
    """Most states one query reads: tokens, or entries of several tokens."""
    visibility, storage = component.visibility, component.storage
    if not isinstance(visibility, TopK):
        return math.inf
    return visibility.k * visibility.unit / (storage.ratio if isinstance(storage, Pooled) else 1)


def _products(component: Component) -> int:
    """Multiply-adds per state and query head: the length of its key plus that of its value.

    A latent is key as a whole, and value without its rotary part; a pooled entry is key and value as a whole.
    """
    storage = component.storage
    if isinstance(storage, KV):
        return storage.k_dim + storage.v_dim
    return 2 * storage.dim + (storage.rope_dim if isinstance(storage, Latent) else 0)


def attention_seconds(work: Iterable[Work], hardware: Hardware, kv_dtype: str, batch: int = 1) -> float:
    """Modelled seconds of one step of `batch` requests that each do `work`."""
    rate = hardware.rate(kv_dtype)
    return batch * sum(_roof(one.bytes, one.flops, hardware.bandwidth, rate) for one in work)


def _roof(count: float, flops: float, bandwidth: float, rate: float) -> float:
    return max(count / bandwidth, flops / rate)


def step_cost(
    layout: Layout, context: int, hardware: Hardware, *, batch: int = 1, weights: Weights | None = None
) -> StepCost:
    """A dense decode step of `batch` requests with `context` tokens each; `HardwareError` without a matrix rate."""
    if context < 1 or batch < 1:
        raise HardwareError(f"context {context} and batch {batch} must be at least 1")
    dtype = hardware.cache_dtype or layout.kv_dtype
    rate = hardware.rate(layout.kv_dtype)
    parts: dict[str, float] = {}
    waiting = 0.0
    pieces = [(one.kind, batch * one.bytes, batch * one.flops) for one in decode_work(layout, context, dtype)]
    if weights is not None:
        pieces.append(("weights", weights.bytes, 2.0 * weights.parameters * batch))
    for kind, count, flops in pieces:
        seconds = _roof(count, flops, hardware.bandwidth, rate)
        parts[kind] = parts.get(kind, 0.0) + seconds
        waiting += seconds if count / hardware.bandwidth >= flops / rate else 0.0
    held = batch * bytes_at(layout, context, dtype).total + (weights.bytes if weights else 0.0)
    total = sum(parts.values())
    ordered = {kind: parts[kind] for kind in KINDS if kind in parts}
    return StepCost(ordered, waiting / total if total else 1.0, held, held <= hardware.capacity)


@dataclass(frozen=True)
class Traffic:
    """What a run measured of an arm, against dense in the same questions."""

    read_bytes: float
    """Per decoded token, at the layout's `kv_dtype`: K, V, side data, metadata, scoring scan."""
    dense_read_bytes: float
    selected: float
    """Tokens read per KV head and layer in the arm's scope."""
    dense_selected: float
    """The same for dense, over the same layers."""
    encoded: bool = False
    """Whether the arm reads codes, whose bytes do not depend on the dtype of what is not encoded."""


def arm_work(dense: Sequence[Work], scope: frozenset[int], traffic: Traffic, widened: float = 1.0) -> list[Work]:
    """Dense's work with the arm's measured traffic in the layers it may act on; the other layers are dense's.

    The measured difference in bytes is laid on the scope's K and V, in proportion; operations follow the tokens read.

    widened: bytes of an element in `dense` / bytes of one at the layout's `kv_dtype`, in which traffic is measured
    """
    inside = sum(one.bytes for one in dense if one.layer in scope)
    total = sum(one.bytes for one in dense)
    base = traffic.dense_read_bytes * inside / total if total else 0.0
    changed = traffic.read_bytes - traffic.dense_read_bytes
    by_bytes = max(0.0, 1 + changed / base) / (widened if traffic.encoded else 1.0) if base else 1.0
    by_tokens = traffic.selected / traffic.dense_selected if traffic.dense_selected else 1.0
    return [
        replace(one, bytes=one.bytes * by_bytes, flops=one.flops * by_tokens) if one.layer in scope else one
        for one in dense
    ]


@dataclass(frozen=True)
class Point:
    """One shape whose time was both modelled and measured on the same hardware."""

    label: str
    modelled: float
    """Seconds."""
    measured: float


@dataclass(frozen=True)
class Calibration:
    """How far the model is from measured times, and the one factor that brings it nearest."""

    scale: float
    """Geometric mean of measured / modelled: what modelled seconds on this hardware are to be multiplied by."""
    errors: Mapping[str, float]
    """|predicted / measured - 1| by shape, each predicted with the scale that the other shapes give."""

    @property
    def error(self) -> float:
        """Median over shapes."""
        return median(self.errors.values())


def calibrate(points: Sequence[Point]) -> Calibration | None:
    """Fit one factor, and judge it on shapes it was not fitted on; None with fewer than two, which leave no test."""
    if len(points) < 2:
        return None
    logs = [math.log(point.measured / point.modelled) for point in points]
    total = math.fsum(logs)
    rest = len(points) - 1
    errors = {
        point.label: abs(math.exp((total - own) / rest) * point.modelled / point.measured - 1)
        for point, own in zip(points, logs, strict=True)
    }
    return Calibration(math.exp(fmean(logs)), errors)
