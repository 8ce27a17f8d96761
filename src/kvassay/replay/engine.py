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
from kvassay.errors import ExperimentError
from kvassay.kernels.device import LaneRead, SlotRead, kernel
from kvassay.kernels.reads import paged_layer, selected_read, slot_read, stored_reads
from kvassay.kernels.reference import attend
from kvassay.layout.model import Layer
from kvassay.policy.card import STEPS, Evidence, Prefill
from kvassay.policy.queries import Queries
from kvassay.policy.readset import ReadSet
from kvassay.policy.views import Rows
from kvassay.record.calling import attention_through, cache_keyword, decoder_layers, last_rows
from kvassay.record.entries import keeps_raw
from kvassay.record.indexers import IndexRows
from kvassay.record.latent import UpProjection, latent_of, up_projection
from kvassay.replay import asking
from kvassay.replay.bytes import held, read_bytes
from kvassay.replay.compressors import Compressors, beside, entry_choices, keeps_entries
from kvassay.replay.indexing import Asked, handing_over, scanned_bytes
from kvassay.replay.lane import Lane
from kvassay.replay.passing import PassThrough
from kvassay.replay.projections import inputs_kept, standing_in

NAME = "kvassay_replay"
QUERY_EVIDENCE = {Evidence.QUERIES, Evidence.ATTENTION}


class Engine:
    """Runs a model over lanes of one `PagedCache`, with the decode kernel of the device where its blocks lie."""

    def __init__(self, model: Any, cache: PagedCache) -> None:
        self.model, self.cache = model, cache
        self.kernel = kernel(str(cache.store.device))
        self._keyword = cache_keyword(model)
        self._up: dict[int, UpProjection] = {}
        self._compressing = keeps_entries(cache.layout)

    def forward(
        self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]], last: int, *, committed: bool = True
    ) -> Tensor:
        """Feed each lane its next tokens (equally many); returns logits [lanes, last, vocab] of the last ones.

        With `last` 0 the model's head is spared. Policies that act on what is written do so layer by layer; afterwards
        every policy that is due observes, decides and summarises. After uncommitted tokens none is asked anything
        until `settle`.
        """
        if self._compressing and len(lanes) > 1:  # compressors fold one sequence at a time
            each = [
                self.forward([lane], [ids], last, committed=committed) for lane, ids in zip(lanes, tokens, strict=True)
            ]
            return torch.cat(each)
        start = [lane.length for lane in lanes]
        self._prepare_compressors(lanes)
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
            handing_over(self.model, self.cache.layout, step.take_index),
            entry_choices(self.model, self.cache.layout) as step.entries,
        ):
            inputs = {
                "input_ids": torch.tensor([list(ids) for ids in tokens], device=device),
                "position_ids": positions.to(device),
                "use_cache": True,
                self._keyword: step.passing,
                **self._mask(len(lanes), count, device),
            }
            if last:
                logits: Tensor = self.model(**inputs, logits_to_keep=last_rows(count, last)).logits.float().cpu()
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

    def _prepare_compressors(self, lanes: Sequence[Lane]) -> None:
        """Give a lane that begins what the model's compressors begin with."""
        for lane in lanes if self._compressing else ():
            if lane.compressors is None and lane.length:
                raise ExperimentError(f"arm '{lane.arm.label}': its {lane.length} tokens were never compressed")
            lane.compressors = lane.compressors or Compressors.empty(self.model, self.cache.layout)

    def up_projection(self, index: int, module: nn.Module) -> UpProjection | None:
        """What a latent layer's keys and values are expanded with; None for a layer that keeps no latent."""
        layer = self.cache.layout.layers[index]
        if latent_of(layer) is None:
            return None
        if index not in self._up:
            self._up[index] = up_projection(module, layer)
        return self._up[index]

    def _mask(self, lanes: int, tokens: int, device: torch.device) -> dict[str, Tensor]:
        """A mask that masks nothing, for models that cut one for their index: visibility is by position here."""
        selecting = any(latent_of(layer) and layer.topk for layer in self.cache.layout.layers)
        return {"attention_mask": torch.zeros(lanes, 1, tokens, 1, device=device)} if selecting else {}

    def settle(self, lane: Lane, accepted: int) -> None:
        """Commit a lane's first `accepted` uncommitted tokens, roll the others back, and let its policy act.

        A policy that acts at every step acts once, after the last accepted token, and sees nothing of the others.
        """
        ids, hidden = lane.settle(accepted)
        for layer, queries in list(lane.queries.items()):
            lane.queries[layer] = queries.before(lane.length).last(lane.keep_queries)
        if ids:
            asking.written(lane, lane.scope)
            self._settle(lane, ids, hidden)

    def _settle(self, lane: Lane, ids: Sequence[int], hidden: dict[int, Tensor]) -> None:
        """What happens to a lane once its tokens are in."""
        lane.generated += len(ids)
        lane.traffic.tokens += len(ids)
        evidence = asking.Evidences(recent=lambda layer: lane.queries[layer])
        asking.observe(lane, ids, evidence, hidden)
        asking.summarize(lane)
        for moment in STEPS:
            if asking.due(lane, moment, len(ids)):
                asking.decide(lane, evidence, moment=moment)
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

        return decoder_layers(self.model)[layer].register_forward_hook(keep)


class _Step:
    """One forward pass under way."""

    def __init__(self, engine: Engine, lanes: Sequence[Lane], positions: Tensor) -> None:
        self.engine, self.cache, self.lanes, self.positions = engine, engine.cache, lanes, positions
        self.seqs = [lane.seq for lane in lanes]
        compressors = lanes[0].compressors
        self.passing = PassThrough(self.cache.layout, None if compressors is None else compressors.layers)
        self._indexed: dict[int, IndexRows] = {}
        self.entries: dict[int, Tensor] = {}
        """Entries that the model's own indexes choose, by layer."""

    def take_index(self, index: int, rows: IndexRows) -> None:
        """Take what a layer's index computed of this pass; its keys go with the lanes."""
        self._indexed[index] = rows
        for lane, keys in zip(self.lanes, rows.keys, strict=True):
            held = lane.index.get(index)
            lane.index[index] = keys if held is None else torch.cat([held, keys])

    def _asked(self, row: int, index: int) -> Asked | None:
        """What the index that selects for a layer is asked with in this pass; None where nothing is selected."""
        selector = self.cache.layout.selector(index)
        if selector is None:
            return None
        rows = self._indexed[selector.index]
        weights = None if rows.weights is None else rows.weights[row]
        return Asked(rows.queries[row], weights, self.lanes[row].index[selector.index])

    def answer(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """What the model's attention module is to get: see `attend`, which a latent layer asks absorbed."""
        index = int(module.layer_idx)  # type: ignore[arg-type]
        if latent_of(self.cache.layout.layers[index]) or keeps_raw(self.cache.layout.layers[index]):
            q, k, v = q.cpu(), k.cpu(), v.cpu()  # what these compute beside attention is written for main memory
        if keeps_raw(self.cache.layout.layers[index]):
            return self._beside_entries(self.cache.layout.layers[index], q, k, sinks)
        up = self.engine.up_projection(index, module)
        if up is None:
            return self.attend(index, q, k, v, sinks)
        rows = self.passing.vectors(index).to(q.device)
        v_dim = self.cache.layout.layers[index].kv.v_dim
        return up.materialise(self.attend(index, up.absorb(q), rows, rows[..., :v_dim], sinks))

    def _beside_entries(self, layer: Layer, q: Tensor, k: Tensor, sinks: Tensor | None) -> Tensor:
        """Attention of the one lane over its window and k's entries: k [1, 1, tokens + entries, dim], tokens first."""
        (lane,), tokens = self.lanes, q.shape[2]
        self._write(layer.index, k[:, :, :tokens], k[:, :, :tokens])
        data = self.cache.stored(lane.seq, layer.index, tokens)
        seen = asking.seen(lane, layer.index, data, self.positions[0], None)
        scanned = scanned_bytes(self.cache.layout, layer.index, self.positions[0], None)
        self._charge_read(lane, layer.index, data, seen, scanned)
        lane.traffic.index += scanned * tokens
        both = beside(layer, data, seen, k[0, 0, tokens:], self.positions[0], self.entries.get(layer.index))
        lane.traffic.charge(layer, both.elements * self.cache.layout.element_bytes)
        return attend(q[0], both.data, both.seen, scale=layer.scale, softcap=layer.softcap, sinks=sinks)[None]

    def _write(self, index: int, k: Tensor, v: Tensor) -> None:
        """Write the pass's k, v [lanes, kv_heads, tokens, dim] of a layer; policies may act on them at once."""
        self.cache.write(index, self.seqs, k, v)
        for lane in self.lanes:
            asking.written(lane, [index])

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Attention of one layer: q [lanes, q_heads, tokens, k_dim]; returns [lanes, q_heads, tokens, v_dim]."""
        layer = self.cache.layout.layers[index]
        owner = index if layer.cache_of is None else layer.cache_of
        if q.shape[2] != self.positions.shape[1]:
            raise ExperimentError(
                f"layer {index} attends with {q.shape[2]} queries in a chunk of {self.positions.shape[1]} tokens"
            )
        if layer.cache_of is None:
            self._write(index, k, v)
        near = q.cpu() if any(map(_looks_at_queries, self.lanes)) else q
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        in_place: dict[int, LaneRead] = {}
        for row, lane in enumerate(self.lanes):
            asked = self._asked(row, index)
            chosen, scanned, data = asking.select(lane, index, near[row], asked)
            lane.traffic.index += scanned * q.shape[2] if asked is not None else 0.0
            reads = self._plain(row, owner, chosen, scanned)
            if reads is None:
                data = data or self.cache.stored(lane.seq, owner, q.shape[2])
                seen = asking.seen(lane, layer.index, data, self.positions[row], chosen)
                self._charge_read(lane, owner, data, seen, scanned)
                if chosen is None and q.shape[2] <= self.engine.kernel.longest_chunk:
                    reads = self._stored(row, owner, data)
                else:
                    found = attend(q[row].cpu(), data, seen, scale=layer.scale, softcap=layer.softcap, sinks=sinks)
                    out[row] = found.to(out.device)
            if reads is not None:
                in_place[row] = reads
            if lane.policy.card.evidence & QUERY_EVIDENCE and index in lane.scope:
                by_model = chosen if chosen is not None and not chosen.own else None
                lane.note_queries(index, Queries(near[row], self.positions[row], by_model))
        if in_place:
            rows = list(in_place)
            paged = paged_layer(self.cache, layer, sinks)
            decode = self.engine.kernel
            found = decode.decode(paged, q[rows].to(decode.place), list(in_place.values()))
            out[rows] = found[..., : out.shape[-1]].to(out.device)
        return out

    def _plain(self, row: int, owner: int, chosen: ReadSet | None, scanned: float) -> LaneRead | None:
        """What a short chunk reads of a layer that lies in slots alone, charged; None if it does not, or in no list."""
        seq, tokens = self.seqs[row], self.positions.shape[1]
        if tokens > self.engine.kernel.longest_chunk or not self.cache.is_plain(seq, owner):
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
        elements = float(counts.sum()) * kv.row
        lane.traffic.charge(layer, elements * self.cache.layout.element_bytes + scanned * len(counts))
        if layer.index in lane.scope:
            lane.traffic.selected += float(counts.double().mean(1).sum()) / lane.readers

    def _charge_read(self, lane: Lane, owner: int, data: Stored, seen: Tensor, scanned: float) -> None:
        """Charge what each of the chunk's queries read: the union over the query heads of a KV head."""
        kv_heads = data.positions.shape[0]
        union = seen.view(kv_heads, -1, *seen.shape[1:]).any(1)
        tokens = union.shape[1]
        bytes_read, per_head = read_bytes(self.cache, lane.seq, owner, data, union)
        lane.traffic.charge(self.cache.layout.layers[owner], bytes_read + scanned * tokens)
        if owner in lane.scope:
            lane.traffic.selected += per_head / lane.readers


def _looks_at_queries(lane: Lane) -> bool:
    """Whether a lane's policy is shown queries: to choose what they read, or as evidence."""
    return lane.policy.writes_read or bool(lane.policy.card.evidence & QUERY_EVIDENCE)


def _selected(view: SlotView, chosen: ReadSet) -> SlotRead | None:
    """The slots of a read set, and the query's own if it says so, if it has one list per KV head or one for all."""
    heads = view.positions.shape[0]
    if chosen.index.shape[1] not in (1, heads):
        return None
    where = view.logical if chosen.own else view.positions
    mask = chosen.mask(torch.from_numpy(where.astype(np.int64)), heads)[0].numpy()
    if chosen.own:
        mask[np.arange(heads), view.counts - 1] = True
    return selected_read(view, mask)


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
    sinks, step = given.get("s_aux"), _ACTIVE.get()
    q, k, v = (x.float().to(step.cache.store.device) for x in (query, key, value))
    out = step.answer(module, q, k, v, None if sinks is None else sinks.float().cpu())
    return out.transpose(1, 2).to(query.device, query.dtype).contiguous(), None


AttentionInterface.register(NAME, _attention)
