"""Rows of one synthetic layer, any stretch of them at any time: nothing is held, the same seed gives the same rows.

Rows are drawn in blocks of `BLOCK` positions, each from a seed of its own, so that neither the order nor the size of
the pieces asked for changes a value. Keys and queries are rotated at their true positions.
"""

from __future__ import annotations

import hashlib
import math
from functools import cached_property

import torch
from torch import Tensor

from kvassay.cache.rope import rotate
from kvassay.layout.model import Layer
from kvassay.record.synthetic.fitting import FittedHead, Stream, fit_head
from kvassay.record.synthetic.measure import FAR, SKIPPED
from kvassay.record.synthetic.statistics import SPANS, LayerStatistics

BLOCK = 4096
"""Positions drawn together; a multiple of every span."""
CLEAR = 2.0
"""Nats by which the logit of a target exceeds the largest that chance is expected to give."""


class SyntheticLayer:
    """Keys, values and queries of one layer over a context and a question after it.

    The question's first `natural` tokens ask as recorded questions do. Each of the others looks for a planted token,
    `targets` in order, in the query head that does so most often.
    """

    def __init__(
        self, layer: Layer, known: LayerStatistics, scale: float, *, context: int, question: int, seed: int
    ) -> None:
        """`scale`: factor of the logits that `known` was recorded with."""
        self.layer, self.known, self.scale = layer, known, scale
        self.context, self.question, self.seed = context, question, seed
        self.natural = max(1, question // 2)
        self._heads: dict[int, FittedHead] = {}
        self._last: tuple[tuple[str, int, int], Tensor] | None = None

    # -- rows ---------------------------------------------------------------------------------------

    def keys(self, head: int, first: int, count: int) -> Tensor:
        """float32 [count, k_dim] of a KV head from position `first` on, rotated."""
        return self._stretch("key", head, first, count)

    def values(self, head: int, first: int, count: int) -> Tensor:
        """float32 [count, v_dim] of a KV head from position `first` on."""
        return self._stretch("value", head, first, count)

    def queries(self, head: int, first: int, count: int) -> Tensor:
        """float32 [count, k_dim] of a query head from position `first` on, rotated; made for the layer's own factor."""
        turned = self._stretch("query", head, first, count)
        for position, target in self.aimed(head, first, count).items():
            row = position - first
            turned[row] = self._turned_to(turned[row], head // self.layer.group_size, target, position)
        return turned

    # -- targets ------------------------------------------------------------------------------------

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """Planted tokens: one per equal part of the context, the same in every layer."""
        count = self.question - self.natural
        if self.context < SKIPPED + 2:
            return ()
        edges = torch.linspace(SKIPPED, self.context - 1, count + 1).long()
        draws = torch.rand(count, generator=_generator(self.seed, "targets"))
        return tuple(int(a + (b - a) * x) for a, b, x in zip(edges[:-1], edges[1:], draws, strict=True))

    def aimed(self, head: int, first: int, count: int) -> dict[int, int]:
        """What a query head looks for, by its position: only those that look for one token in particular."""
        share = self._head(head // self.layer.group_size).aimed[head % self.layer.group_size]
        found = {}
        for block in range(first // BLOCK, (first + count - 1) // BLOCK + 1):
            chance, where = torch.rand(2, BLOCK, generator=_generator(self.seed, self.layer.index, "aim", head, block))
            start = block * BLOCK
            for position in range(max(first, start), min(first + count, start + BLOCK)):
                draw = float(chance[position - start]), float(where[position - start])
                target = self._target(head, position, share, *draw)
                if target is not None:
                    found[position] = target
        return found

    def _target(self, head: int, position: int, share: float, chance: float, where: float) -> int | None:
        planted, last = position - self.context - self.natural, position - FAR
        if planted >= 0:
            return self.targets[planted] if head == self.keenest and planted < len(self.targets) else None
        last = min(last, self.context - 1)
        return int(SKIPPED + where * (last - SKIPPED)) if chance < share and last > SKIPPED else None

    @cached_property
    def keenest(self) -> int:
        """The query head that looks for single tokens most often, and for the planted ones."""
        shares = [share for head in range(self.layer.kv.kv_heads) for share in self._head(head).aimed]
        return max(range(len(shares)), key=lambda head: shares[head])

    def _turned_to(self, query: Tensor, head: int, target: int, position: int) -> Tensor:
        """The query turned to the key of `target` along the direction that tells it best from its neighbours, so far
        that its logit clears the largest that chance gives among all earlier ones."""
        start = target - target % BLOCK
        near = self.keys(head, start, min(BLOCK, self.context - start))
        centred = near - near.mean(0)
        own = centred[target - start]
        spread = centred.T @ centred / len(near)
        ridge = spread.diagonal().mean() * 1e-3 * torch.eye(len(spread))
        direction = torch.linalg.solve(spread + ridge, own)
        # Along it the target stands `apart` standard deviations from the others, `chance` of which chance gives.
        apart, chance = float((direction @ own).clamp(min=0).sqrt()), math.sqrt(2 * math.log(position))
        logits = near @ query * self.layer.scale
        lacking = float(logits.mean() + logits.std() * chance + CLEAR - logits[target - start])
        strength = max(0.0, lacking) / max(apart - chance, apart / 4)
        return query + direction * (strength / (apart * self.layer.scale))

    # -- drawing ------------------------------------------------------------------------------------

    def _head(self, head: int) -> FittedHead:
        if head not in self._heads:
            self._heads[head] = fit_head(self.layer, head, self.known, self.scale)
        return self._heads[head]

    def _stream(self, kind: str, head: int) -> Stream:
        if kind == "query":
            return self._head(head // self.layer.group_size).queries[head % self.layer.group_size]
        fitted = self._head(head)
        return fitted.key if kind == "key" else fitted.value

    def _stretch(self, kind: str, head: int, first: int, count: int) -> Tensor:
        """Rows [count, dim], rotated but for values; block by block, so that little is held beside them."""
        out = torch.empty(count, self._stream(kind, head).rest.shape[0])
        for block in range(first // BLOCK, (first + count - 1) // BLOCK + 1):
            low, high = max(first, block * BLOCK), min(first + count, (block + 1) * BLOCK)
            rows = self._block(kind, head, block)[low - block * BLOCK : high - block * BLOCK]
            if kind != "value":
                rows = rotate(rows, torch.arange(low, high), self.layer.rope)
            out[low - first : high - first] = rows
        return out

    def _block(self, kind: str, head: int, block: int) -> Tensor:
        key = kind, head, block
        if self._last is None or self._last[0] != key:
            self._last = key, self._drawn(kind, head, block)
        return self._last[1]

    def _drawn(self, kind: str, head: int, block: int) -> Tensor:
        stream = self._stream(kind, head)
        generator = _generator(self.seed, self.layer.index, kind, head, block)
        lasting = [torch.randn(BLOCK // span, stream.width, generator=generator) for span in SPANS]
        ids = self._types(block)
        rows = stream.rows(ids, torch.randn(BLOCK, stream.width, generator=generator), lasting)
        after = max(0, self.context - block * BLOCK)
        if stream.question is not None and after < BLOCK:
            rows[after:] += stream.question - stream.centres[ids[after:]]
        if block == 0 and stream.first is not None:
            rows[0] = stream.first
        return rows

    def _types(self, block: int) -> Tensor:
        """Types of a block's tokens, the same for every head: int64 [BLOCK]."""
        generator = _generator(self.seed, self.layer.index, "types", block)
        return torch.multinomial(self.known.frequency, BLOCK, replacement=True, generator=generator)


def _generator(seed: int, *place: object) -> torch.Generator:
    """A generator of its own for every place."""
    digest = hashlib.sha256("/".join(map(str, (seed, *place))).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
