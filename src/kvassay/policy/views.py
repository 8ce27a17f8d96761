"""Read-only views: all that a policy ever sees of a cache.

A view shows positions and block ordinals, never block ids. It only offers the evidence that the policy's
card declares, and it meters what is touched, so that a scan is charged to the policy in bytes.
Shapes: keys and values [kv_heads, tokens, dim]; masks [kv_heads, tokens]; queries [q_heads, queries, dim].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvassay.cache.data import LayerData
from kvassay.cache.rope import unrotate
from kvassay.errors import EvidenceMissing, PolicyError
from kvassay.kernels.mass import received
from kvassay.kernels.reference import attention_weights
from kvassay.layout.model import Layer
from kvassay.policy.budget import Protection
from kvassay.policy.card import TAPS, Card, Evidence, When
from kvassay.policy.queries import Queries
from kvassay.policy.readset import seen


@dataclass
class Meter:
    """Bytes a policy has touched (at the layout's `kv_dtype`), by what it touched."""

    element_bytes: float
    touched: dict[str, float] = field(default_factory=dict)

    def add(self, what: str, elements: float, element_bytes: float | None = None) -> None:
        """Charge `elements` of `what`."""
        size = self.element_bytes if element_bytes is None else element_bytes
        self.touched[what] = self.touched.get(what, 0.0) + elements * size

    @property
    def total(self) -> float:
        """All bytes touched so far."""
        return sum(self.touched.values())


@dataclass(frozen=True)
class Rows:
    """Recorded evidence of consecutive tokens: `values` [rows, ...] and their true positions [rows]."""

    values: Tensor
    positions: Tensor


Evidences = Mapping[Evidence, Callable[[], Queries]]


class LayerView:
    """One layer of one sequence as a policy sees it; everything is loaded on first touch."""

    def __init__(
        self,
        layer: Layer,
        card: Card,
        load: Callable[[], LayerData],
        *,
        length: int,
        protection: Protection,
        meter: Meter,
        queries: Evidences | None = None,
        rows: Mapping[Evidence, Callable[[], Rows]] | None = None,
        sinks: Tensor | None = None,
        side: Mapping[str, Tensor] | None = None,
        block_size: int = 16,
        code_bytes: Callable[[], tuple[float, float]] | None = None,
    ) -> None:
        self.layer, self.card, self.length, self.block_size = layer, card, length, block_size
        self.protection = protection
        self.side: Mapping[str, Tensor] = side or {}
        """Packed side data per full block, as `summarize` returned it: [blocks, kv_heads, ...]."""
        self._load, self._meter, self._queries = load, meter, queries or {}
        self._rows, self._sinks = rows or {}, sinks
        self._code_bytes = code_bytes
        self._data: LayerData | None = None
        self._metered: set[str] = set()
        self._others: list[LayerView] = []

    # What is always visible: geometry and positions.

    @property
    def index(self) -> int:
        """Layer number."""
        return self.layer.index

    @property
    def data(self) -> LayerData:
        """What the cache holds; policies use the named properties instead."""
        if self._data is None:
            self._data = self._load()
        return self._data

    def forget(self) -> None:
        """Drop what was loaded; the next touch loads it again. For a replay that holds one layer at a time."""
        self._data = None
        for other in self._others:
            other.forget()

    def seen_by(self, card: Card, keep: Tensor | None = None) -> LayerView:
        """The same layer as the policy of another card sees it: of all tokens, or only those that `keep` names.

        keep: bool [kv_heads, tokens]. What is touched there is charged to the same meter.
        """
        other = LayerView(
            self.layer,
            card,
            (lambda: self.data) if keep is None else (lambda: self.data.only(keep)),
            length=self.length,
            protection=self.protection,
            meter=self._meter,
            queries=self._queries,
            rows=self._rows,
            sinks=self._sinks,
            side=self.side,
            block_size=self.block_size,
            code_bytes=self._code_bytes,
        )
        self._others.append(other)
        return other

    @property
    def element_bytes(self) -> float:
        """Bytes of an element that is in no code, at the layout's `kv_dtype`."""
        return self._meter.element_bytes

    @property
    def positions(self) -> Tensor:
        """int64 [kv_heads, tokens], true positions; -1 pads ragged heads."""
        return self.data.positions

    @property
    def slots(self) -> Tensor:
        """int64 [kv_heads, tokens], logical slot; `slots // unit` is the ordinal of a block of `unit`."""
        return self.data.slots

    @property
    def alive(self) -> Tensor:
        """bool [kv_heads, tokens], False on padding."""
        return self.data.positions >= 0

    @property
    def encoded(self) -> Tensor:
        """bool [kv_heads, tokens]: already held in a code, so that a policy encodes only what is new."""
        return torch.zeros_like(self.alive) if self.data.encoded is None else self.data.encoded & self.alive

    @property
    def kv_heads(self) -> int:
        """KV heads of this layer."""
        return int(self.data.positions.shape[0])

    @property
    def tokens(self) -> int:
        """Width of the view: the most tokens any KV head holds."""
        return int(self.data.positions.shape[1])

    @property
    def protected(self) -> Tensor:
        """bool [kv_heads, tokens]: the first `sink` and last `recent` positions of the sequence."""
        return self.protected_from(1)[:, 0]

    def protected_from(self, queries: int) -> Tensor:
        """bool [kv_heads, queries, tokens]: what was protected when each of so many newest positions had just come."""
        p, newest = self.positions[:, None], torch.arange(self.length - queries, self.length)[:, None]
        recent = (p > newest - self.protection.recent) & (p <= newest)
        return ((p < self.protection.sink) | recent) & self.alive[:, None]

    # Evidence: declared, metered.

    @property
    def keys(self) -> Tensor:
        """float [kv_heads, tokens, k_dim], post-RoPE, as cached."""
        self._touch(Evidence.KEYS)
        self._charge("keys", self.data.k)
        return self.data.k

    @property
    def keys_unrotated(self) -> Tensor:
        """float [kv_heads, tokens, k_dim]: the cached keys with their rotation taken back."""
        self._touch(Evidence.KEYS_UNROTATED)
        self._charge("keys", self.data.k)
        return unrotate(self.data.k, self.positions.clamp(min=0), self.layer.rope)

    @property
    def values(self) -> Tensor:
        """float [kv_heads, tokens, v_dim]; of a latent layer the beginning of the keys, which are read once."""
        self._touch(Evidence.VALUES)
        if self.data.one_side:
            self._charge("keys", self.data.k)
        else:
            self._charge("values", self.data.v)
        return self.data.v

    def queries(self, last: int) -> Queries:
        """Up to `last` of the most recent recorded queries; `EvidenceMissing` if none were recorded."""
        self._touch(Evidence.QUERIES)
        return self._get(Evidence.QUERIES).last(last)

    def future_queries(self) -> Queries:
        """Queries recorded after this moment; for the declared `hindsight` reference only."""
        self._touch(Evidence.FUTURE_QUERIES)
        return self._get(Evidence.FUTURE_QUERIES)

    def attention(self, last: int) -> Tensor:
        """float [q_heads, queries, tokens]: causal attention of the last queries over the cached keys."""
        self._touch(Evidence.ATTENTION)
        self._charge("keys", self.data.k)
        return self.attend(self._get(Evidence.QUERIES).last(last))

    def attention_sum(self, last: int) -> Tensor:
        """float [q_heads, tokens]: `attention(last)` summed over the queries, whose rows are not held."""
        self._touch(Evidence.ATTENTION)
        return self.attend_sum(self._get(Evidence.QUERIES).last(last))

    def hidden(self) -> Rows:
        """Residual stream entering this layer, of the context's tokens: [rows, hidden_size]."""
        return self._tap(Evidence.HIDDEN)

    def layer_input(self) -> Rows:
        """What this layer's q, k and v projections read, of the context's tokens: [rows, hidden_size]."""
        return self._tap(Evidence.LAYER_INPUT)

    def row_lse(self) -> Rows:
        """Natural-log sum of exponentials of each query's visible scores, sink included: [rows, q_heads]."""
        return self._tap(Evidence.ROW_LSE, 4.0)

    def bucket_scores(self) -> Rows:
        """Scaled, soft-capped scores against the keys of the query's own bucket: [rows, q_heads, size].

        Column c of position p is the key at `p - p % size + c`; -inf where the query does not see it.
        """
        return self._tap(Evidence.BUCKET, 4.0)

    def mass(self, query: Tensor) -> Tensor:
        """float [q_heads, queries, tokens]: exact attention of this step's `query` [q_heads, queries, dim].

        The queries are those of the newest positions, `length - queries` to `length - 1`.
        """
        self._touch(Evidence.QUERY)
        queries = query.shape[1]
        self._charge("keys", self.data.k, unseen=(queries - 1) / 2)
        return self.attend(Queries(query, torch.arange(self.length - queries, self.length)))

    def attend(self, queries: Queries) -> Tensor:
        """Softmax rows [q_heads, queries, tokens] of given queries over the keys of this view (and the sink).

        Of queries for which the model's own index chose, over what it chose.
        """
        stored, layer = self.data.stored, self.layer
        mask = seen(stored, queries.positions, layer.q_heads, window=layer.window, chosen=queries.chosen)
        return attention_weights(queries.q, stored, mask, scale=layer.scale, softcap=layer.softcap, sinks=self._sinks)

    def attend_sum(self, queries: Queries) -> Tensor:
        """float [q_heads, tokens]: `attend` summed over the queries, in memory that their number does not add to."""
        self._charge("keys", self.data.k)
        stored, layer, chosen = self.data.stored, self.layer, queries.chosen
        return received(
            queries.q,
            stored,
            queries.positions,
            scale=layer.scale,
            window=layer.window,
            allowed=None if chosen is None else lambda part: chosen.part(part).allowed(stored, layer.q_heads),
            own=chosen is None or chosen.own,
            softcap=layer.softcap,
            sinks=self._sinks,
        )

    def group_sum(self, rows: Tensor) -> Tensor:
        """Sum [q_heads, ...] over the query heads of each KV head: [kv_heads, ...]."""
        return rows.view(self.kv_heads, -1, *rows.shape[1:]).sum(1)

    def side_data(self, name: str) -> Tensor:
        """One kind of side data over all full blocks, metered as read: [blocks, kv_heads, ...]."""
        if name not in self.side:
            known = (
                ", ".join(map(repr, self.side)) or "none: `summarize` writes it, with 'block_full' in the card's `when`"
            )
            raise PolicyError(f"policy '{self.card.name}': no side data '{name}' (there is {known})")
        tensor = self.side[name]
        self._charge(f"side:{name}", tensor, tensor.element_size())
        return tensor

    def _touch(self, evidence: Evidence) -> None:
        if evidence not in self.card.evidence:
            raise EvidenceMissing(
                f"policy '{self.card.name}' touched {evidence} of layer {self.index} without declaring it in its card"
            )

    def _get(self, evidence: Evidence) -> Queries:
        if evidence not in self._queries:
            raise EvidenceMissing(
                f"policy '{self.card.name}' needs {evidence} of layer {self.index}, which this trace does not hold; "
                "record with a larger --q-tail"
            )
        return self._queries[evidence]()

    def _tap(self, evidence: Evidence, element_bytes: float | None = None) -> Rows:
        self._touch(evidence)
        if evidence not in self._rows:
            raise EvidenceMissing(
                f"policy '{self.card.name}' needs {evidence} of layer {self.index}, which is not there: it is offered "
                f"when the context is compressed, from a trace made by record with --tap {TAPS[evidence]}"
            )
        found = self._rows[evidence]()
        if evidence not in self._metered:
            self._metered.add(evidence)
            self._meter.add(evidence, found.values.numel(), element_bytes)
        return found

    def _charge(self, what: str, tensor: Tensor, element_bytes: float | None = None, unseen: float = 0.0) -> None:
        """Charge a tensor once, per query; `unseen`: newest tokens per KV head that the average query does not see."""
        if what not in self._metered:
            self._metered.add(what)
            if what.startswith("side"):
                self._meter.add(what, tensor.numel(), element_bytes)
                return
            raw, coded = float((self.alive & ~self.encoded).sum()), float(self.encoded.sum())
            hidden = unseen * self.kv_heads
            newest = self.positions == self.length - 1
            in_code = bool((newest & self.encoded).any())  # then so are those just before it
            self._meter.add(what, (raw - (0.0 if in_code else hidden)) * tensor.shape[-1], element_bytes)
            if self._code_bytes is not None and coded:
                share = 1 - hidden / coded if in_code else 1.0
                self._meter.add(what, share * self._code_bytes()[what == "values"], 1.0)


@dataclass(frozen=True)
class BlockView:
    """Blocks of one layer that have just filled: keys and values [blocks, kv_heads, block_size, dim]."""

    layer: Layer
    keys: Tensor
    values: Tensor
    artefact: Mapping[str, Tensor] = field(default_factory=dict)
    """What the policy learnt offline, by name: side data may be made with it."""


@dataclass(frozen=True)
class CacheView:
    """All layers a policy may act on, in one sequence, at one moment."""

    layers: Mapping[int, LayerView]
    length: int
    """True length of the sequence; the next token's position."""
    context: int
    """Tokens of the compressed context: what the budget is a fraction of."""
    moment: When = When.AFTER_PREFILL
    """Why the policy is asked now."""


class HiddenStates(dict[int, Tensor]):
    """Hidden states by layer, [tokens, hidden_size]; asking for a layer that the card does not tap is an error."""

    def __init__(self, card: Card, taps: Collection[int], hidden: Mapping[int, Tensor]) -> None:
        super().__init__({layer: hidden[layer] for layer in taps})
        self._card = card

    def __missing__(self, layer: int) -> Tensor:
        raise EvidenceMissing(
            f"policy '{self._card.name}' touched the hidden state of layer {layer}, it taps {sorted(self) or 'none'}"
        )


@dataclass(frozen=True)
class StepView:
    """One processed chunk (one token, in decode) of one sequence, after the model ran over it."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    cache: CacheView
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    """Declared taps: layer -> that decoder layer's output [tokens, hidden_size]."""
