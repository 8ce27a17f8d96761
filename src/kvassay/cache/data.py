"""What the cache hands out for one layer of one sequence: live tokens only.

`Stored` is how it lies: raw slots and encoded segments side by side, for attention, which goes by position
and needs no order. `LayerData` is how a policy sees it: by ascending position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


class Run:
    """Keys and values [kv_heads, tokens, dim] of one run of tokens, each read when first looked at."""

    def __init__(self, keys: Callable[[], Tensor], values: Callable[[], Tensor], tokens: int) -> None:
        self._keys, self._values, self.tokens = keys, values, tokens
        self.v_dim: int | None = None
        """Set where values are the first so many elements of the keys (MLA)."""

    @cached_property
    def k(self) -> Tensor:
        """Keys, post-RoPE."""
        return self._keys()

    @cached_property
    def v(self) -> Tensor:
        """Values."""
        return self._values()

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> Run:
        """A run that is there already."""
        return cls(lambda: k, lambda: v, k.shape[1])

    @classmethod
    def latent(cls, keys: Callable[[], Tensor], v_dim: int, tokens: int) -> Run:
        """A run whose values are the first `v_dim` elements of its keys."""
        run = cls(keys, lambda: run.k[..., :v_dim], tokens)
        run.v_dim = v_dim
        return run

    @classmethod
    def together(cls, runs: Sequence[Run], join: Callable[[list[Tensor]], Tensor], tokens: int) -> Run:
        """Runs of a layer as one, joined when somebody looks at it; values that lie in keys are not joined again."""

        def keys() -> Tensor:
            return join([run.k for run in runs])

        v_dim = runs[0].v_dim
        if v_dim is not None and all(run.one_side for run in runs):
            return cls.latent(keys, v_dim, tokens)
        return cls(keys, lambda: join([run.v for run in runs]), tokens)

    @classmethod
    def end_to_end(cls, runs: Sequence[Run]) -> Run:
        """Runs of a layer as one, in their order."""
        if len(runs) == 1:
            return runs[0]
        return cls.together(runs, lambda sides: torch.cat(sides, 1), sum(run.tokens for run in runs))

    @property
    def one_side(self) -> bool:
        """Whether the values are the beginning of the keys (MLA)."""
        return self.v_dim is not None


@dataclass(frozen=True)
class Stored:
    """Runs of keys and values, one after the other along the token axis, in no particular order.

    positions, slots: int64 [kv_heads, tokens], -1 on padding (there keys and values are arbitrary)
    bias: float [kv_heads, tokens] added to logits (after a soft-cap), or None
    inner_bias: the same, added before the layer's soft-cap
    encoded: bool [kv_heads, tokens], True where held in an encoded segment; None: nowhere
    complete: no padding anywhere
    """

    runs: tuple[Run, ...]
    positions: Tensor
    slots: Tensor
    bias: Tensor | None = None
    encoded: Tensor | None = None
    complete: bool = False
    inner_bias: Tensor | None = None

    @property
    def alive(self) -> Tensor:
        """bool [kv_heads, tokens]."""
        return self.positions >= 0

    def by_position(self) -> LayerData:
        """The same tokens by ascending position, padding last and as narrow as it can be."""
        if self.encoded is None:  # slots alone come by position
            run = Run.end_to_end(self.runs)
            return LayerData(run, self.positions, self.slots, self.bias, inner_bias=self.inner_bias)
        alive = self.alive
        width = int(alive.sum(1).max()) if alive.numel() else 0
        key = self.positions.masked_fill(~alive, torch.iinfo(torch.int64).max)
        order = torch.sort(key, dim=1, stable=True).indices[:, :width]
        return _Reordered(self, order)


class LayerData:
    """Keys and values as read back through the address map, encoded parts decoded, by ascending position.

    k, v: [kv_heads, tokens, dim]; positions, slots: int64 [kv_heads, tokens], -1 on the padding of ragged
    heads (there k and v are arbitrary); bias, inner_bias: float [kv_heads, tokens] added to logits after or
    before the soft-cap, or None; encoded: bool [kv_heads, tokens], True where the token is held in an encoded
    segment, or None. `slots` are logical: `slots // block_size` is the ordinal of the block in the sequence's
    table. Tokens that live in encoded segments have the slot they were written to.
    """

    def __init__(
        self,
        run: Run,
        positions: Tensor,
        slots: Tensor,
        bias: Tensor | None = None,
        encoded: Tensor | None = None,
        inner_bias: Tensor | None = None,
    ) -> None:
        self._run = run
        self.positions, self.slots, self.encoded = positions, slots, encoded
        self.bias, self.inner_bias = bias, inner_bias

    @property
    def k(self) -> Tensor:
        """Keys, post-RoPE."""
        return self._run.k

    @property
    def v(self) -> Tensor:
        """Values."""
        return self._run.v

    @property
    def one_side(self) -> bool:
        """Whether the values are the beginning of the keys (MLA)."""
        return self._run.one_side

    @property
    def alive(self) -> Tensor:
        """bool [kv_heads, tokens]."""
        return self.positions >= 0

    @classmethod
    def dense(cls, k: Tensor, v: Tensor, first: int = 0) -> LayerData:
        """All tokens of k, v [kv_heads, tokens, dim] alive, at positions `first`, `first` + 1, ..."""
        positions = torch.arange(first, first + k.shape[1]).expand(k.shape[0], -1)
        return cls(Run.of(k, v), positions, positions)

    @classmethod
    def ragged(cls, k: Tensor, v: Tensor, positions: Tensor) -> LayerData:
        """Tokens at given positions [kv_heads, tokens], -1 where a shorter head is padded."""
        return cls(Run.of(k, v), positions, positions)

    @cached_property
    def stored(self) -> Stored:
        """The same as one run."""
        complete = bool(self.alive.all())
        return Stored((self._run,), self.positions, self.slots, self.bias, self.encoded, complete, self.inner_bias)

    def take(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, n, dim] of columns int64 [kv_heads, n], without touching the others."""
        return _pick([self.k], columns), _pick([self.v], columns)

    def only(self, keep: Tensor) -> LayerData:
        """The live tokens that bool [kv_heads, tokens] names, packed as after an eviction of all others."""
        kept = keep & self.alive
        positions, slots = (x.masked_fill(~kept, -1) for x in (self.positions, self.slots))
        return _Reordered(replace(self.stored, positions=positions, slots=slots, complete=False), to_front(kept))


class _Reordered(LayerData):
    """A `Stored` by position; keys and values are only brought together when somebody looks at them."""

    def __init__(self, stored: Stored, order: Tensor) -> None:
        def pick(x: Tensor | None) -> Tensor | None:
            return None if x is None else torch.gather(x, 1, order)

        self._stored, self._order = stored, order
        super().__init__(
            Run.together(stored.runs, lambda sides: _pick(sides, order), order.shape[1]),
            torch.gather(stored.positions, 1, order),
            torch.gather(stored.slots, 1, order),
            pick(stored.bias),
            pick(stored.encoded),
            pick(stored.inner_bias),
        )

    def take(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        order, runs = torch.gather(self._order, 1, columns), self._stored.runs
        return _pick([run.k for run in runs], order), _pick([run.v for run in runs], order)


def to_front(chosen: Tensor) -> Tensor:
    """Columns int64 [heads, n] that bring what bool [heads, tokens] names to the front, in its order; n: the most of a
    head, the columns of a head with fewer end in some that are not named."""
    width = int(chosen.sum(1).max()) if chosen.numel() else 0
    return torch.sort((~chosen).to(torch.int8), dim=1, stable=True).indices[:, :width]


def _pick(runs: Sequence[Tensor], order: Tensor) -> Tensor:
    """Rows `order` [kv_heads, n] of runs laid end to end."""
    heads = torch.arange(order.shape[0])[:, None]
    if len(runs) == 1:
        return runs[0][heads, order]
    out = runs[0].new_empty(*order.shape, runs[0].shape[-1])
    first = 0
    for run in runs:
        inside = (order >= first) & (order < first + run.shape[1])
        if bool(inside.any()):
            row, column = inside.nonzero(as_tuple=True)
            out[row, column] = run[heads.expand_as(order)[inside], order[inside] - first]
        first += run.shape[1]
    return out
