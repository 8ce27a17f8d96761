"""Policies written again by hand, in float64 over the oracle's plain tensors: column j is position j."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.replay.oracle import Oracle, code
from tests.replay.plain import top
from tests.replay.worlds import World

SINK, RECENT = 2, 8


def weights(q: Tensor, k: Tensor, scale: float, cap: float | None, sink: float | None) -> Tensor:
    """Softmax row [tokens] of one query [dim] over keys [tokens, dim]; the sink takes its share of it."""
    logits = k @ q * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    extra = logits.new_tensor([] if sink is None else [sink])
    return torch.softmax(torch.cat([logits, extra]), 0)[: len(k)]


def head_weights(world: World, index: int, head: int, q: Tensor, k: Tensor) -> Tensor:
    """The same for a query of one head of a layer."""
    layer, sinks = world.trace.layout.layers[index], world.trace.header.sinks.get(index)
    return weights(q, k, layer.scale, layer.softcap, None if sinks is None else sinks[head])


def snapkv(world: World, oracle: Oracle, keep: int, window: int, kernel: int) -> None:
    """Evict all but the protected tokens and those that the last `window` queries attend to most."""
    length = oracle.context
    for index in oracle.full:
        queries, k = world.trace.prefix.q(index).double(), oracle.k[index]
        group = queries.shape[1] // len(k)
        score = torch.zeros(k.shape[:2], dtype=torch.float64)
        for t in range(length - window, length):
            for head in range(queries.shape[1]):
                row = head_weights(world, index, head, queries[t, head], k[head // group, : t + 1])
                score[head // group, : t + 1] += row / (window * group)
        score[:, length - window :] = 0
        pooled = torch.stack([smooth(row, kernel) for row in score])
        pooled[:, length - window :] = math.inf
        oracle.alive[index] = top(pooled, keep, SINK, RECENT, length)


def smooth(row: Tensor, kernel: int) -> Tensor:
    """Mean over `kernel` neighbours, what lies outside counted as 0."""
    half = kernel // 2
    return torch.stack([row[max(0, i - half) : i + half + 1].sum() / kernel for i in range(len(row))])


class ExactMass:
    """A query reads the `take` tokens of largest mass, summed over the query heads of a KV head."""

    def __init__(self, world: World, take: int) -> None:
        self.world, self.take = world, take
        self.asked: list[tuple[int, int]] = []
        """Owner's layer and number of query heads, of every question."""

    def __call__(self, oracle: Oracle, owner: int, q: Tensor) -> Tensor | None:
        if owner not in oracle.full:
            return None
        self.asked.append((owner, len(q)))
        k = oracle.k[owner]
        group = len(q) // len(k)
        rows = [head_weights(self.world, owner, h, q[h], k[h // group]) for h in range(len(q))]
        mass = torch.stack(rows).unflatten(0, (len(k), group)).sum(1)
        return top(mass, self.take, SINK, RECENT, oracle.length).repeat_interleave(group, 0)


class Quest:
    """A query reads the pages whose range of keys bounds its logits highest; the ends are forced."""

    def __init__(self, page: int, pages: int) -> None:
        self.page, self.pages = page, pages

    def __call__(self, oracle: Oracle, owner: int, q: Tensor) -> Tensor | None:
        if owner not in oracle.full:
            return None
        k, last = oracle.k[owner], (oracle.length - 1) // self.page
        group = len(q) // len(k)
        forced = {0, *range((oracle.length - RECENT) // self.page, last + 1)}
        allowed = torch.zeros(len(q), k.shape[1], dtype=torch.bool)
        for of in range(len(k)):
            bounds = [max(self.bound(k[of], page, q[of * group + h]) for h in range(group)) for page in range(last)]
            order = sorted(range(last + 1), key=lambda p: math.inf if p in forced else bounds[p], reverse=True)
            for page in order[: self.pages]:
                allowed[of * group : (of + 1) * group, page * self.page : (page + 1) * self.page] = True
        return allowed

    def bound(self, k: Tensor, page: int, q: Tensor) -> float:
        """The largest logit that some key within the page's ranges could have; ranges are kept in float16."""
        keys = k[page * self.page : (page + 1) * self.page]
        high, low = outwards(keys.amax(0)), -outwards(-keys.amin(0))
        return float(torch.maximum(q * high, q * low).sum())


def outwards(x: Tensor) -> Tensor:
    """The smallest float16 that is not below x."""
    half = x.half()
    above = torch.nextafter(half, torch.full_like(half, math.inf))
    return torch.where(half.double() < x, above, half).double()


class Kivi:
    """Once `group` tokens are older than the newest `residual`, their keys are rounded per channel and their values
    per token in groups of `group` channels."""

    def __init__(self, oracle: Oracle, bits: int, group: int, residual: int) -> None:
        self.bits, self.group, self.residual, self.done = bits, group, residual, 0
        self(oracle)
        oracle.after = self

    def __call__(self, oracle: Oracle) -> None:
        while self.done + self.group + self.residual <= oracle.length:
            tokens = slice(self.done, self.done + self.group)
            for index in oracle.full:
                for head in range(len(oracle.k[index])):
                    self._code(oracle.k[index][head, tokens].T)
                    self._code(oracle.v[index][head, tokens])
            self.done += self.group

    def _code(self, rows: Tensor) -> None:
        for row in rows:
            for part in row.split(self.group):
                part.copy_(code(part.float(), self.bits))
