"""The model in the loop: one forward pass over many lanes, each attending to its own cache.

The model is any transformers causal LM; only its attention is replaced, through transformers' registry.
New keys and values go into the paged cache, and every lane's queries are answered from what that lane
retains: in place where a chunk is short, else by the torch reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from kvassay.cache.data import Stored
from kvassay.cache.edits import LowRank
from kvassay.cache.ops import SlotView
from kvassay.cache.paged import PagedCache
from kvassay.kernels.cpu import CpuKernel
from kvassay.kernels.device import LaneRead, SlotRead
from kvassay.kernels.reads import paged_layer, selected_read, slot_read, stored_reads
from kvassay.kernels.reference import attend
from kvassay.layout.model import Layer
from kvassay.policy.card import Evidence, Prefill, When
from kvassay.policy.readset import ReadSet
from kvassay.policy.views import Rows
from kvassay.record.calling import attention_through, cache_keyword
from kvassay.replay import asking
from kvassay.replay.bytes import held, read_bytes
from kvassay.replay.lane import Lane
from kvassay.replay.projections import inputs_kept, standing_in

NAME = "kvassay_replay"
IN_PLACE = 8
"""Longest chunk that attends in place; a longer one is worth gathering for matrix products."""
QUERY_EVIDENCE = {Evidence.QUERIES, Evidence.ATTENTION}


class Engine:
    """Runs a model over lanes of one `PagedCache`."""

    def __init__(self, model: Any, cache: PagedCache) -> None:
        self.model, self.cache = model, cache
        self.kernel = CpuKernel()
        self._keyword = cache_keyword(model)

    def forward(
        self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]], last: int, *, committed: bool = True
    ) -> Tensor:
        """Feed each lane its next tokens (equally many); returns logits [lanes, last, vocab] of the last ones.

        With `last` 0 the model's head is spared. Afterwards every policy that is due observes, decides and
        summarises; after uncommitted tokens none is asked anything until `settle`.
        """
        start = [lane.length for lane in lanes]
        for lane, ids in zip(lanes, tokens, strict=True):
            lane.extend(ids, committed=committed)
        count = len(tokens[0])
        positions = torch.tensor(start)[:, None] + torch.arange(count)
        step = _Step(self, lanes, positions)
        device = next(self.model.parameters()).device
        with (
            torch.inference_mode(),
            _attending(self.model, step),
            self._hidden_taps(lanes) as hidden,
            self._projecting(lanes),
        ):
            inputs = {
                "input_ids": torch.tensor([list(ids) for ids in tokens], device=device),
                "position_ids": positions.to(device),
                "use_cache": True,
                self._keyword: _PassThrough(),
            }
            if last:
                logits: Tensor = self.model(**inputs, logits_to_keep=last).logits.float().cpu()
            else:
                self.model.base_model(**inputs)
                logits = torch.empty(len(lanes), 0, self.cache.layout.vocab_size)
        for row, (lane, ids) in enumerate(zip(lanes, tokens, strict=True)):
            states = {layer: states[row] for layer, states in hidden.items()}
            if committed:
                self._settle(lane, ids, states)
            else:
                lane.hold(ids, states)
        return logits

    def settle(self, lane: Lane, accepted: int) -> None:
        """Commit a lane's first `accepted` uncommitted tokens, roll the others back, and let its policy act.

        A policy that acts at every step acts once, after the last accepted token, and sees nothing of the others.
        """
        ids, hidden = lane.settle(accepted)
        for layer, queries in list(lane.queries.items()):
            lane.queries[layer] = queries.before(lane.length).last(lane.keep_queries)
        if ids:
            self._settle(lane, ids, hidden)

    def _settle(self, lane: Lane, ids: Sequence[int], hidden: dict[int, Tensor]) -> None:
        """What happens to a lane once its tokens are in."""
        lane.generated += len(ids)
        lane.traffic.tokens += len(ids)
        evidence = asking.Evidences(recent=lambda layer: lane.queries[layer])
        asking.observe(lane, ids, evidence, hidden)
        asking.summarize(lane)
        for moment in (When.EVERY_STEP, When.EVERY_N):
            if asking.due(lane, moment, len(ids)):
                asking.decide(lane, evidence)
        if lane.stepwise:  # other lanes only grow: their last step is their peak
            lane.peak_bytes = max(lane.peak_bytes, held(lane).total)

    def _projecting(self, lanes: Sequence[Lane]) -> AbstractContextManager[None]:
        """Let policies that change the projections do so, in lanes that prefill by themselves."""
        layers = self.cache.layout.layers
        rows: dict[int, dict[int, LowRank]] = {}
        for row, lane in enumerate(lanes):
            if lane.arm.prefill is Prefill.OWN and lane.policy.writes_project:
                asked = {index: lane.policy.project(layers[index], lane.memory) for index in sorted(lane.scope)}
                rows[row] = {index: edit for index, edit in asked.items() if edit is not None}
        return standing_in(self.model, layers, rows)

    @contextmanager
    def inputs_kept(self, lane: Lane) -> Iterator[Callable[[int], Mapping[Evidence, Callable[[], Rows]]]]:
        """Offer what the projections read in the pass made inside, if the lane's policy declares it."""
        layers = [self.cache.layout.layers[i] for i in sorted(lane.scope)]
        first = lane.length
        with inputs_kept(self.model, layers if Evidence.LAYER_INPUT in lane.policy.card.evidence else ()) as found:

            def rows(layer: int) -> Mapping[Evidence, Callable[[], Rows]]:
                if layer not in found:
                    return {}
                return {Evidence.LAYER_INPUT: lambda: Rows(found[layer][0], torch.arange(first, lane.length))}

            yield rows

    @contextmanager
    def _hidden_taps(self, lanes: Sequence[Lane]) -> Iterator[dict[int, Tensor]]:
        """Collect the output of each decoder layer that some lane's card taps: [lanes, tokens, hidden]."""
        layers = len(self.cache.layout.layers)
        wanted = {layer for lane in lanes for layer in lane.policy.taps_in(layers)}
        found: dict[int, Tensor] = {}
        hooks = [self._tap(layer, found) for layer in wanted]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def _tap(self, layer: int, found: dict[int, Tensor]) -> Any:
        def keep(module: nn.Module, arguments: Any, output: Any) -> None:
            found[layer] = (output[0] if isinstance(output, tuple) else output).detach().float().cpu()

        return self.model.base_model.layers[layer].register_forward_hook(keep)


class _Step:
    """One forward pass under way."""

    def __init__(self, engine: Engine, lanes: Sequence[Lane], positions: Tensor) -> None:
        self.engine, self.cache, self.lanes, self.positions = engine, engine.cache, lanes, positions
        self.seqs = [lane.seq for lane in lanes]

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Attention of one layer: q [lanes, q_heads, tokens, k_dim]; returns [lanes, q_heads, tokens, v_dim]."""
        layer = self.cache.layout.layers[index]
        owner = index if layer.cache_of is None else layer.cache_of
        if layer.cache_of is None:
            self.cache.write(index, self.seqs, k, v)
        out = torch.empty(*q.shape[:3], v.shape[-1])
        in_place: dict[int, LaneRead] = {}
        for row, lane in enumerate(self.lanes):
            chosen, scanned, data = asking.select(lane, owner, q[row])
            reads = self._plain(row, owner, chosen, scanned)
            if reads is None:
                data = data or self.cache.stored(lane.seq, owner, q.shape[2])
                seen = asking.seen(lane, layer.index, data, self.positions[row], chosen)
                self._charge_read(lane, owner, data, seen, scanned)
                if chosen is None and q.shape[2] <= IN_PLACE:
                    reads = self._stored(row, owner, data)
                else:
                    out[row] = attend(q[row], data, seen, scale=layer.scale, softcap=layer.softcap, sinks=sinks)
            if reads is not None:
                in_place[row] = reads
        if in_place:
            rows = list(in_place)
            paged = paged_layer(self.cache, layer, sinks)
            out[rows] = self.engine.kernel.decode(paged, q[rows], list(in_place.values()))
        for row, lane in enumerate(self.lanes):
            if lane.policy.card.evidence & QUERY_EVIDENCE and index in lane.scope:
                lane.note_queries(index, q[row].float().cpu(), self.positions[row])
        return out

    def _plain(self, row: int, owner: int, chosen: ReadSet | None, scanned: float) -> LaneRead | None:
        """What a short chunk reads of a layer that lies in slots alone, charged; None if it does not, or in no list."""
        seq, tokens = self.seqs[row], self.positions.shape[1]
        if tokens > IN_PLACE or not self.cache.is_plain(seq, owner):
            return None
        layer, view = self.cache.layout.layers[owner], self.cache.ledger.slots(seq, owner, tokens)
        if chosen is None:
            read = slot_read(view, self.positions[row].numpy(), layer.window)
        else:
            listed = _selected(view, chosen) if tokens == 1 else None
            if listed is None:
                return None
            read = listed
        counts = read.last if read.first is None else read.last - read.first
        self._charge(self.lanes[row], layer, counts, scanned)
        return [read]

    def _stored(self, row: int, owner: int, data: Stored) -> LaneRead:
        """What a short chunk reads of a layer in any form, codes by their decoded copies."""
        tokens = self.positions.shape[1]
        view, window = self.cache.ledger.slots(self.seqs[row], owner, tokens), self.cache.layout.layers[owner].window
        return stored_reads(data, view, self.positions[row].numpy(), window)

    def _charge(self, lane: Lane, layer: Layer, counts: Tensor, scanned: float) -> None:
        """Charge `counts` [queries, kv_heads] tokens read, and what each query's choice scanned."""
        kv = layer.kv
        elements = float(counts.sum()) * (kv.k_dim + kv.v_dim)
        lane.traffic.bytes += elements * self.cache.layout.element_bytes + scanned * len(counts)
        if layer.index in lane.scope:
            lane.traffic.selected += float(counts.double().mean(1).sum()) / len(lane.scope)

    def _charge_read(self, lane: Lane, owner: int, data: Stored, seen: Tensor, scanned: float) -> None:
        """Charge what each of the chunk's queries read: the union over the query heads of a KV head."""
        kv_heads = data.positions.shape[0]
        union = seen.view(kv_heads, -1, *seen.shape[1:]).any(1)
        tokens = union.shape[1]
        bytes_read, per_head = read_bytes(self.cache, lane.seq, owner, data, union)
        lane.traffic.bytes += bytes_read + scanned * tokens
        if owner in lane.scope:
            lane.traffic.selected += per_head / len(lane.scope)


def _selected(view: SlotView, chosen: ReadSet) -> SlotRead | None:
    """The slots of a read set and the query's own, if it has one list per KV head or one for all."""
    heads = view.positions.shape[0]
    if chosen.index.shape[1] not in (1, heads):
        return None
    mask = chosen.mask(torch.from_numpy(view.logical.astype(np.int64)), heads)[0].numpy()
    mask[np.arange(heads), view.counts - 1] = True
    return selected_read(view, mask)


class _PassThrough:
    """What the model takes for its cache: new keys and values go straight on to the attention function."""

    is_compileable = False

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Hand back what came in."""
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        """Positions are always given explicitly, so nobody may ask."""
        return 0


_ACTIVE: ContextVar[_Step] = ContextVar("kvassay_step")


@contextmanager
def _attending(model: Any, step: _Step) -> Iterator[None]:
    token = _ACTIVE.set(step)
    try:
        with attention_through(model, NAME):
            yield
    finally:
        _ACTIVE.reset(token)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """What transformers calls in place of its attention. No mask is built: visibility is by position."""
    sinks = given.get("s_aux")
    out = _ACTIVE.get().attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query.float().cpu(),
        key.float().cpu(),
        value.float().cpu(),
        None if sinks is None else sinks.float().cpu(),
    )
    return out.transpose(1, 2).to(query.device, query.dtype).contiguous(), None


AttentionInterface.register(NAME, _attention)
