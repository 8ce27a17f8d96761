"""One engine step under way: the rows that its attention layers show, in batch order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvassay.errors import RecordError
from kvassay.layout.model import Layout
from kvassay.record.vllm.capture import Ran, top_logits
from kvassay.record.vllm.limits import Limits
from kvassay.record.vllm.subset import chosen_q_heads

LOGIT_ROWS = 64
"""Rows of logits in memory at a time: a row is the whole vocabulary."""


class Taking:
    """Collects a step's tensors; `requests` are the scheduled ones in batch order with their token counts."""

    def __init__(self, layout: Layout, limits: Limits, requests: Sequence[tuple[str, int]]) -> None:
        self.layout, self.limits = layout, limits
        self.requests = requests
        self.count = sum(count for _, count in requests)
        self.rows: dict[str, Tensor] = {}
        self.ran: tuple[Ran, ...] = ()
        self._positions = torch.empty(0, dtype=torch.long)

    def begin(self, ids: Tensor | None, positions: Tensor) -> None:
        """Take what the model is fed, [tokens or more]: `RecordError` unless plain, consecutive text tokens."""
        if ids is None or positions.ndim != 1:
            raise RecordError("the engine feeds embeddings or several position axes; recording takes text models")
        tokens, self._positions = ids[: self.count].cpu(), positions[: self.count].cpu()
        ran, row = [], 0
        for name, count in self.requests:
            first = int(self._positions[row])
            if not torch.equal(self._positions[row : row + count], torch.arange(first, first + count)):
                raise RecordError(f"request {name}: a step computes positions that do not follow one another")
            ran.append(Ran(id=name, first=first, ids=tuple(tokens[row : row + count].tolist())))
            row += count
        self.ran = tuple(ran)

    def inputs(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Take a layer's rows: query [n or more, q_heads * k_dim], key and value [.., kv_heads * dim]."""
        kv, heads = self.layout.source(index).kv, chosen_q_heads(self.layout, index, self.limits.kv_heads)
        kept = None if self.limits.kv_heads is None else list(self.limits.kv_heads)
        self.rows[f"{index}.q"] = self._take(query, kv.k_dim, heads)[self._from(self.limits.q_from)]
        if self.layout.layers[index].cache_of is None:
            self.rows[f"{index}.k"] = self._take(key, kv.k_dim, kept)
            self.rows[f"{index}.v"] = self._take(value, kv.v_dim, kept)

    def output(self, index: int, output: Tensor) -> None:
        """Take a layer's attention output, [n or more, q_heads * v_dim]."""
        heads = chosen_q_heads(self.layout, index, self.limits.kv_heads)
        rows = self._take(output, self.layout.source(index).kv.v_dim, heads)
        self.rows[f"{index}.output"] = rows[self._from(self.limits.q_from)]

    def has_slots(self, group: int) -> bool:
        """Whether a group's slots were taken: all its layers write to the same."""
        return f"slots.{group}" in self.rows

    def slots(self, group: int, mapping: Tensor) -> None:
        """Take where a group's rows are written, [n or more]."""
        self.rows[f"slots.{group}"] = mapping[: self.count].to("cpu", torch.long, copy=True)

    def logits(self, model: Any, hidden: Any) -> None:
        """Compute and take the logits of the rows wanted from the last hidden states, [n or more, hidden]."""
        wanted = self._from(self.limits.logits_from)
        if not self.limits.logits_k or not bool(wanted.any()):
            return
        if not isinstance(hidden, Tensor):
            raise RecordError("the model returns more than hidden states; record without logits")
        states = hidden[: self.count][wanted.to(hidden.device)]
        parts = [top_logits(model.compute_logits(part), self.limits.logits_k) for part in states.split(LOGIT_ROWS)]
        self.rows |= _joined(parts)

    def _take(self, flat: Tensor, dim: int, heads: Sequence[int] | None) -> Tensor:
        rows = flat[: self.count].reshape(self.count, -1, dim)
        return (rows if heads is None else rows[:, list(heads)]).to("cpu", copy=True)

    def _from(self, position: int) -> Tensor:
        return self._positions >= position


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
