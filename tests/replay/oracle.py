"""The same model in float64 over plain tensors: no blocks, no slots, no engine; a method is applied by hand.

One token at a time. Column j of every tensor is position j, always: what a method evicts is masked, what it
rewrites is overwritten, so true positions are the only ones there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvassay.trace.reader import Branch
from tests.replay.worlds import World

NAME = "plain_oracle"


class Oracle:
    """K, V per layer [kv_heads, tokens, dim], what is still read, and what is added to its logits."""

    def __init__(self, world: World) -> None:
        self.model, self.layout = world.exact, world.trace.layout
        prefix = world.trace.prefix
        layers = [layer.index for layer in self.layout.storing]
        self.k = {i: prefix.k(i).transpose(0, 1).double() for i in layers}
        self.v = {i: prefix.v(i).transpose(0, 1).double() for i in layers}
        self.alive = {i: torch.ones(self.k[i].shape[:2], dtype=torch.bool) for i in layers}
        self.bias = {i: torch.zeros(self.k[i].shape[:2], dtype=torch.float64) for i in layers}
        self.context = self.length = prefix.tokens
        self._new: dict[int, tuple[Tensor, Tensor]] = {}
        """What each storing layer took in last, [kv_heads, dim]."""
        self.hidden: dict[int, Tensor] = {}
        """Each decoder layer's output for the newest token, [hidden_size]."""
        self.written: Callable[[Oracle, int], None] = lambda oracle, layer: None
        """The method's rule for what a layer has just taken in, before it is read."""
        self.after: Callable[[Oracle], None] = lambda oracle: None
        """The method's rule at the end of a step."""
        self.select: Callable[[Oracle, int, Tensor], Tensor | None] = lambda oracle, layer, q: None
        """What a query [q_heads, dim] of a layer may read: bool [q_heads, tokens], or None for all that is alive."""

    @property
    def full(self) -> list[int]:
        """Layers that hold a cache of their own, without a window."""
        return [layer.index for layer in self.layout.storing if layer.window is None]

    def answer(self, branch: Branch) -> Tensor:
        """float64 logits [answer tokens, vocab], teacher-forced."""
        with torch.no_grad(), self._installed():
            rows = [self._step(token) for token in branch.token_ids.tolist()]
        return torch.stack(rows[branch.question_tokens - 1 : -1])

    def _step(self, token: int) -> Tensor:
        self.length += 1
        out = self.model(
            input_ids=torch.tensor([[token]]),
            position_ids=torch.tensor([[self.length - 1]]),
            use_cache=False,
        )
        self.after(self)
        logits: Tensor = out.logits[0, -1]
        return logits

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any]) -> Tensor:
        """Attention of q [q_heads, dim] after taking in k, v [kv_heads, 1, dim]: [q_heads, v_dim].

        Scale, window, soft-cap and sinks are what the model itself says in `given`; a layer that shares a cache
        must bring what the layer that stores it has just taken in.
        """
        owner = self.layout.source(index).index
        if owner == index:
            self._take(index, k, v)
            self.written(self, index)
        assert torch.equal(k[:, 0], self._new[owner][0]) and torch.equal(v[:, 0], self._new[owner][1])
        allowed = self.select(self, owner, q)
        group, window, cap, sinks = q.shape[0] // k.shape[0], *map(given.get, ("sliding_window", "softcap", "s_aux"))
        out = torch.empty(q.shape[0], v.shape[2], dtype=q.dtype)
        for head in range(q.shape[0]):
            of = head // group
            mask = self.alive[owner][of].clone()
            if window is not None:
                mask[: max(0, self.length - window)] = False
            if allowed is not None:
                mask &= allowed[head]
                mask[-1] = True
            logits = self.k[owner][of][mask] @ q[head] * given["scaling"]
            logits = (logits if cap is None else cap * torch.tanh(logits / cap)) + self.bias[owner][of][mask]
            most = logits.max()
            weights = (logits - most).exp()
            sink = 0.0 if sinks is None else (sinks[head] - most).exp()
            out[head] = weights @ self.v[owner][of][mask] / (weights.sum() + sink)
        return out

    def _take(self, index: int, k: Tensor, v: Tensor) -> None:
        self._new[index] = k[:, 0], v[:, 0]
        self.k[index], self.v[index] = torch.cat([self.k[index], k], 1), torch.cat([self.v[index], v], 1)
        self.alive[index] = torch.cat([self.alive[index], torch.ones(k.shape[:2], dtype=torch.bool)], 1)
        self.bias[index] = torch.cat([self.bias[index], torch.zeros(k.shape[:2], dtype=torch.float64)], 1)

    @contextmanager
    def _installed(self) -> Iterator[None]:
        global _current
        _current = self
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(NAME)
        hooks = [
            layer.register_forward_hook(lambda module, args, output, i=i: self._keep(i, output))
            for i, layer in enumerate(self.model.get_decoder().layers)
        ]
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)
            for hook in hooks:
                hook.remove()

    def _keep(self, layer: int, output: Any) -> None:
        self.hidden[layer] = (output[0] if isinstance(output, tuple) else output)[0, -1]


_current: Oracle


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    out = _current.attend(module.layer_idx, query[0, :, 0], key[0], value[0], given)
    return out[None, None], None


AttentionInterface.register(NAME, _attention)


def turn(x: Tensor, positions: Tensor, theta: float, sign: int) -> Tensor:
    """Rotate [heads, tokens, dim] by hand, each pair (i, i + dim/2) a complex number; sign -1 takes it back."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    speed = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    angle = sign * positions.double()[:, None] * speed
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def code(row: Tensor, bits: int) -> Tensor:
    """One row as min/max codes of `bits` bits with a float16 scale and zero, and back: float64."""
    zero = float(row.min().half())
    scale = float(torch.tensor((float(row.max()) - zero) / (2**bits - 1)).half())
    if scale == 0:
        return torch.full_like(row, zero, dtype=torch.float64)
    levels = [min(max(round_half_even((float(x) - zero) / scale), 0), 2**bits - 1) for x in row]
    return torch.tensor([level * scale + zero for level in levels], dtype=torch.float64)


def round_half_even(x: float) -> int:
    """Python's own rounding."""
    return round(x) if math.isfinite(x) else 0
