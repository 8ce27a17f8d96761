"""How long a step of a mixed batch takes: a roofline over weights and attention, or a table of coefficients.

Modelled: weights are read once per step and multiplied with every token of it; attention of each request reads
its cache once (decode) or once per chunk (prefill). Left out, as in `measure.cost`: launches, communication,
sampling, writing K and V. A constant per step can be given for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvassay.layout.model import Layout, TopK, Window
from kvassay.measure.cost import Weights, Work, decode_work
from kvassay.measure.hardware.files import Hardware
from kvassay.replay.serving.footprint import Footprint

FAR = 1 << 30
"""A context beyond any, tokens."""


class Chunk(NamedTuple):
    """Prefill of `tokens` after `before` tokens that are in the cache already."""

    tokens: int
    before: int


class StepTimes(Protocol):
    """Seconds of one step."""

    @property
    def how(self) -> str:
        """Where the times are from, for the result."""
        ...

    def seconds(self, contexts: NDArray[np.int64], chunks: Sequence[Chunk]) -> float:
        """One decoded token for each of `contexts` (tokens in the cache, the new one included), and the chunks."""
        ...

    def scan_seconds(self, tokens: int) -> float:
        """What the policy touches once to score and edit a context of `tokens`."""
        ...


@dataclass(frozen=True)
class TableTimes:
    """Coefficients, from a user's own measurements: seconds of a step are their sum. No policy changes them."""

    step: float
    """Per step."""
    token: float = 0.0
    """Per token computed, prefill and decode alike."""
    context: float = 0.0
    """Per token in the cache of a decoding request."""
    how: str = "table"

    def seconds(self, contexts: NDArray[np.int64], chunks: Sequence[Chunk]) -> float:
        """See `StepTimes.seconds`."""
        tokens = len(contexts) + sum(chunk.tokens for chunk in chunks)
        return self.step + self.token * tokens + self.context * float(contexts.sum())

    def scan_seconds(self, tokens: int) -> float:
        """See `StepTimes.scan_seconds`: not in the table."""
        return 0.0


class RooflineTimes:
    """Modelled times of one layout on one hardware, with an arm's measured traffic in the layers it acts on."""

    def __init__(
        self,
        layout: Layout,
        hardware: Hardware,
        weights: Weights,
        footprint: Footprint,
        step_overhead: float = 0.0,
    ) -> None:
        self.how = f"modelled: roofline of {hardware.name}"
        self._bandwidth, self._rate = hardware.bandwidth, hardware.rate(layout.kv_dtype)
        self._weights, self._overhead, self._scan = weights, step_overhead, footprint.scan_fraction
        dtype = hardware.cache_dtype or layout.kv_dtype
        scope = {layer.index for layer in layout.storing if layer.window is None}
        grid = _kinks(layout)
        rows = [decode_work(layout, context, dtype) for context in grid]
        arm = [[_scaled(one, footprint) if one.layer in scope else one for one in row] for row in rows]
        self._grid = np.array([0, *grid], dtype=np.float64)
        self._decode = _curve([sum(self._roof(one.bytes, one.flops) for one in row) for row in arm])
        # Prefill is dense: a policy acts on what it leaves.
        self._bytes = _curve([sum(one.bytes for one in row) for row in rows])
        self._flops = _curve([sum(one.flops for one in row) for row in rows])
        self._scope_bytes = _curve([sum(one.bytes for one in row if one.layer in scope) for row in rows])

    def seconds(self, contexts: NDArray[np.int64], chunks: Sequence[Chunk]) -> float:
        """See `StepTimes.seconds`."""
        tokens = len(contexts) + sum(chunk.tokens for chunk in chunks)
        linear = self._roof(self._weights.bytes, 2.0 * self._weights.parameters * tokens)
        attention = float(np.interp(contexts, self._grid, self._decode).sum())
        for chunk in chunks:
            middle = chunk.before + (chunk.tokens + 1) / 2
            flops = chunk.tokens * float(np.interp(middle, self._grid, self._flops))
            attention += self._roof(float(np.interp(chunk.before + chunk.tokens, self._grid, self._bytes)), flops)
        return self._overhead + linear + attention

    def scan_seconds(self, tokens: int) -> float:
        """See `StepTimes.scan_seconds`: bytes over bandwidth."""
        return self._scan * float(np.interp(tokens, self._grid, self._scope_bytes)) / self._bandwidth

    def _roof(self, count: float, flops: float) -> float:
        return max(count / self._bandwidth, flops / self._rate)


def _kinks(layout: Layout) -> list[int]:
    """Contexts between which everything a decode step reads grows linearly."""
    found = {1, FAR}
    for layer in layout.storing:
        for component in layer.components:
            visibility = component.visibility
            if isinstance(visibility, Window):
                found.add(visibility.size)
            elif isinstance(visibility, TopK):
                found.add(visibility.k * visibility.unit)
    return sorted(found)


def _curve(values: list[float]) -> NDArray[np.float64]:
    return np.array([0.0, *values])


def _scaled(work: Work, footprint: Footprint) -> Work:
    return Work(work.layer, work.kind, work.bytes * footprint.read_fraction, work.flops * footprint.selected_fraction)


def estimated_parameters(layout: Layout) -> float:
    """A guess where the number of weights is not given: 12 hidden^2 per layer and one embedding, as of a plain
    transformer with a fourfold MLP.
    """
    return 12.0 * len(layout.layers) * layout.hidden_size**2 + layout.vocab_size * layout.hidden_size
