"""Seeing what every attention layer of any transformers model is given: one registered attention function.

The function delegates to the model file's own eager attention, which alone knows sinks, soft-cap and the
like, so the model computes bit for bit what `attn_implementation="eager"` does. It must get eager's additive
float mask, and fold in itself the sparse selection that models apply only under the name "eager" (the
`indices` of DeepSeek's indexer, the `block_indices` of MiniMax-M3).

Whoever records installs a `Capture` for its own context (thread or task); without one the function is plain
eager attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from kvassay.errors import RecordError
from kvassay.layout.model import KV, Layer, Layout
from kvassay.record.calling import attention_through
from kvassay.record.entries import Raw, keeps_raw, split
from kvassay.record.indexers import IndexRows, chosen_units, visible_units
from kvassay.record.latent import UpProjection, cached_vectors, latent_of, up_projection
from kvassay.record.scores import bucket_scores, row_lse

NAME = "kvassay_record"
STORED = ("kv", "kv + index", "latent", "latent + index", "latent, pooled", "latent, pooled + index")
"""What a layer may keep: storage by storage, index keys named where they go with it."""
ATTENTION_TAPS = ("output", "lse", "bucket")
BUCKET = 32
"""Positions per bucket, unless asked otherwise."""
RELATIVE_SCALE_ERROR = 1e-5

Rows = dict[str, Tensor]
"""What one layer showed in one forward pass: tensors of its shard and taps by kind, first axis = tokens."""


def refuse_unreplayable(layout: Layout) -> None:
    """Raise `RecordError` for a layer that no trace can hold what it takes to replay."""
    for layer in layout.storing:
        parts = [(part.storage, " + index" if part.index else "") for part in layer.components]
        kept = ", ".join(type(storage).__name__.lower() + index for storage, index in parts)
        if kept not in STORED or (len(parts) > 1 and not keeps_raw(layer)):
            raise RecordError(
                f"{layout.model_type}: layer {layer.index} ({layer.kind}: {kept}) cannot be replayed from what this "
                f"recorder takes; it takes layers that store {'; '.join(STORED)}, entries only beside raw vectors"
            )
        if layer.topk is not None and layout.selector(layer.index) is None:
            raise RecordError(f"{layout.model_type}: layer {layer.index} reads a selection that no index makes")


class Capture:
    """Collects the rows of one forward pass after another.

    `taps` names the attention taps (`ATTENTION_TAPS`) wanted of each layer; `dtype` is what rows are stored
    in (scores stay float32); `bucket` is the size of a bucket. Call `begin` before a forward pass and `finish`
    after it.
    """

    def __init__(
        self, layout: Layout, dtype: torch.dtype, taps: Mapping[int, frozenset[str]], bucket: int = BUCKET
    ) -> None:
        self.layout, self.dtype, self.taps, self.bucket = layout, dtype, taps, bucket
        self.sinks: dict[int, Tensor] = {}
        """Logit of each query head's attention sink, [q_heads] float32, per layer that has sinks."""
        self._up: dict[int, UpProjection] = {}
        self._cache: Any = None
        self._chosen: dict[int, Tensor] = {}
        self._rows: dict[int, Rows] = {}
        self._stream: dict[tuple[int, str], Tensor] = {}
        self._start = 0
        self._tokens = 0
        self._q_skip = 0

    def begin(self, start: int, tokens: int, q_from: int, cache: Any = None) -> None:
        """Expect `tokens` rows from position `start`; keep queries and outputs from position `q_from` on.

        cache: the transformers cache that the pass writes; layers that keep latents or index keys are read from it
        """
        self._rows, self._stream, self._start, self._tokens = {}, {}, start, tokens
        self._q_skip, self._cache, self._chosen = min(max(q_from - start, 0), tokens), cache, {}

    def finish(self) -> dict[int, Rows]:
        """Return each layer's rows; `RecordError` if a layer of the layout was not called."""
        rows, self._rows = self._rows, {}
        stream, self._stream = self._stream, {}
        missing = [layer.index for layer in self.layout.layers if layer.index not in rows]
        if missing:
            raise RecordError(
                f"{self.layout.model_type}: layers {missing} never called the recording attention function; "
                "the model does not go through transformers' AttentionInterface, or another user of the same "
                "model object switched it away"
            )
        for (index, kind), states in stream.items():
            rows[index][kind] = states
        return rows

    def add_index(self, index: int, rows: IndexRows) -> None:
        """Take what layer `index`'s selection is made from."""
        self._stream[index, "index_keys"] = rows.keys[0].float().cpu().contiguous()
        of_queries = {"index_queries": rows.queries[0].transpose(0, 1)}
        if rows.weights is not None:
            of_queries["index_weights"] = rows.weights[0]
        for name, tensor in of_queries.items():
            self._stream[index, name] = tensor[self._q_skip :].float().cpu().contiguous()

    def add_selection(self, layer: Layer, units: Tensor) -> None:
        """Take what an index chose without telling attention: [n, sets, chosen] units by number, -1 for none."""
        self._stream[layer.index, "selection"] = self._choices(layer, units)

    def _choices(self, layer: Layer, units: Tensor) -> Tensor:
        """What an index chose for the queries that are kept, as a trace holds it: int32 [queries, sets, k]."""
        assert layer.topk is not None
        return visible_units(units, self._start, layer.topk)[self._q_skip :].cpu().contiguous()

    def completed(self, ratio: int) -> int:
        """Entries of `ratio` tokens that this pass completes."""
        return (self._start + self._tokens) // ratio - self._start // ratio

    def add_stream(self, index: int, kind: str, states: Tensor) -> None:
        """Take layer `index`'s tap `kind` of the residual stream, [1, n, hidden_size]."""
        self._stream[index, kind] = states[0].to("cpu", self.dtype, copy=True)

    def add(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        weights: Tensor | None,
        scale: float,
        arguments: Mapping[str, Any],
    ) -> None:
        """Take one layer's rows: query [1, q_heads, n, k_dim], key and value [1, kv_heads, seen, dim],
        output [1, n, q_heads, v_dim], weights [1, q_heads, n, seen].

        Only the last n rows of key and value are new, also where the cache is a sliding window.
        """
        index = int(module.layer_idx)  # type: ignore[arg-type]
        layer = self.layout.layers[index]
        self._check(layer, query, key, value, scale, arguments)
        if index in self._rows:
            raise RecordError(f"layer {index} called attention twice in one forward pass")
        wanted = self.taps.get(index, frozenset())
        raw = split(layer, key[0], self._start, self._tokens) if keeps_raw(layer) else None
        if latent_of(layer) is not None:
            new = self._latent_rows(module, layer, query, weights if "output" in wanted else None)
        else:
            new = {"q": self._stored(query[0], self._q_skip)}
            if raw is not None:
                new |= self._raw_rows(raw)
            elif layer.cache_of is None:
                new["k"] = self._stored(key[0, :, -self._tokens :])
                new["v"] = self._stored(value[0, :, -self._tokens :])
            if "output" in wanted:
                new["output"] = self._stored(output[0].transpose(0, 1), self._q_skip)
        if layer.topk is not None and raw is None:
            new |= self._selected(layer, chosen_units(arguments))
        if "lse" in wanted:
            new["lse"] = row_lse(query, key, weights, scale, layer.softcap).transpose(0, 1).cpu()
        if "bucket" in wanted:
            window = self.layout.source(index).window
            keys = key[0] if raw is None else raw.window
            scores = bucket_scores(query[0], keys, self._start, self.bucket, scale, layer.softcap, window)
            new["bucket"] = scores.cpu()
        if layer.sinks:
            self.sinks[index] = arguments["s_aux"].detach().float().cpu()
        self._rows[index] = new

    def _latent_rows(self, module: nn.Module, layer: Layer, query: Tensor, weights: Tensor | None) -> Rows:
        """The cached vectors, the absorbed queries and, from the attention weights if given, the absorbed output."""
        if layer.index not in self._up:
            self._up[layer.index] = up_projection(module, layer)
        up = self._up[layer.index]
        new = {
            "latent": self._stored(cached_vectors(self._cache, layer, self._tokens)),
            "q": self._stored(up.absorb(query[0].float().cpu()), self._q_skip),
        }
        if weights is not None:
            vectors = cached_vectors(self._cache, layer, weights.shape[-1])
            new["output"] = self._stored(weights[0] @ vectors[..., : layer.kv.v_dim].to(weights.dtype), self._q_skip)
        return new

    def _raw_rows(self, raw: Raw) -> Rows:
        """The new vectors of a window, and the entries completed beside it."""
        new = {"latent": self._stored(raw.window[:, -self._tokens :])}
        if raw.fresh is not None:
            new["pooled"] = self._stored(raw.fresh[None])[:, 0]
        return new

    def _selected(self, layer: Layer, units: Tensor | None) -> Rows:
        """What a layer that selects adds; nothing for one that reads another's selection, once that is checked."""
        selector = self.layout.selector(layer.index)
        if layer is not selector:
            theirs = None if selector is None else self._chosen.get(selector.index)
            if theirs is None or units is None or not torch.equal(theirs, units):
                raise RecordError(
                    f"layer {layer.index} does not read the selection of "
                    f"{'any layer' if selector is None else f'layer {selector.index}'}, as the layout says"
                )
            return {}
        assert units is not None
        self._chosen[layer.index] = units
        return {"selection": self._choices(layer, units)}

    def _stored(self, heads_first: Tensor, skip: int = 0) -> Tensor:
        """[heads, n, dim] -> [n - skip, heads, dim] on the CPU in the stored dtype."""
        rows = heads_first[:, skip:].transpose(0, 1).to("cpu", self.dtype).contiguous()
        if self.dtype is torch.float16 and not bool(torch.isfinite(rows).all()):
            raise RecordError("a row does not fit float16 (magnitude over 65504); record with dtype float32")
        return rows

    def _check(
        self, layer: Layer, query: Tensor, key: Tensor, value: Tensor, scale: float, given: Mapping[str, Any]
    ) -> None:
        """Refuse to record what the layout does not describe: the replay rests on the layout alone."""
        owner = layer if layer.cache_of is None else self.layout.layers[layer.cache_of]
        kv = owner.kv
        pairs: dict[str, tuple[object, object]] = {
            "batch size": (query.shape[0], 1),
            "tokens": (query.shape[2], self._tokens),
            "query heads": (query.shape[1], layer.q_heads),
            "window": (given.get("sliding_window"), owner.window),
            "sinks": (given.get("s_aux") is not None, layer.sinks),
            "soft-cap": (given.get("softcap"), layer.softcap),
            "selection": (chosen_units(given) is not None, layer.topk is not None and not keeps_raw(layer)),
        }
        if isinstance(kv, KV) or keeps_raw(layer):  # the expanded keys of a latent are nothing that is cached
            pairs |= {
                "KV heads": (key.shape[1], kv.kv_heads),
                "key dim": ((query.shape[3], key.shape[3]), (kv.k_dim, kv.k_dim)),
                "value dim": (value.shape[3], kv.v_dim),
            }
        for what, (found, expected) in pairs.items():
            if found != expected:
                raise RecordError(f"layer {layer.index}: {what} is {found}, the layout says {expected}")
        if abs(scale - layer.scale) > RELATIVE_SCALE_ERROR * abs(layer.scale):
            raise RecordError(f"layer {layer.index}: scale is {scale}, the layout says {layer.scale}")
        if given.get("position_bias") is not None:
            raise RecordError(f"layer {layer.index}: attention depends on 'position_bias', which no trace holds yet")


_ACTIVE: ContextVar[Capture | None] = ContextVar("kvassay_capture", default=None)


@contextmanager
def recording(model: Any, capture: Capture) -> Iterator[None]:
    """Send `model`'s attention through `capture` in this context; restore the model's own way on leaving."""
    token = _ACTIVE.set(capture)
    try:
        with attention_through(model, NAME):
            yield
    finally:
        _ACTIVE.reset(token)


def _record_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mask = _with_selection(module, query, key, attention_mask, arguments)
    output, weights = _eager_of(module)(module, query, key, value, mask, scaling=scale, dropout=dropout, **arguments)
    capture = _ACTIVE.get()
    if capture is not None:
        capture.add(module, query, key, value, output, weights, float(scale), arguments)
    return output, weights


def _eager_of(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The eager attention of the file that defines `module`."""
    found = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if found is None:
        raise RecordError(f"{type(module).__name__}: its file defines no eager_attention_forward to delegate to")
    eager: Callable[..., tuple[Tensor, Tensor | None]] = found
    return eager


def _with_selection(
    module: Any, query: Tensor, key: Tensor, mask: Tensor | None, arguments: Mapping[str, Any]
) -> Tensor | None:
    """Fold the sparse selection into the additive mask [1, heads | 1, n, seen]."""
    indices, blocks = arguments.get("indices"), arguments.get("block_indices")
    if indices is not None and mask is not None:  # int32 [1, n, k], one set for all heads
        drop = torch.ones(query.shape[0], query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        drop.scatter_(-1, indices.long(), False)
        mask = mask.masked_fill(drop[:, None], torch.finfo(query.dtype).min)
    if blocks is not None:  # int64 [1, index heads, n, k], -1 = unused
        seen = key.shape[2]
        rows = torch.arange(seen - query.shape[2], seen, device=query.device)[None]
        rows = rows.expand(query.shape[0], -1)
        mask = module.indexer.build_block_mask(blocks, mask, seen, query.dtype, query.device, rows)
    return mask


AttentionInterface.register(NAME, _record_attention)
AttentionMaskInterface.register(NAME, eager_mask)
