"""Any press of kvpress that keeps tokens or does not, asked in kvpress's own environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvassay.cache.edits import Decision, Evict
from kvassay.cache.rope import inverse_frequencies, unrotate
from kvassay.errors import BudgetError, PolicyError
from kvassay.policy.base import EVERY_QUERY, Memory, Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Card, Effect, Evidence
from kvassay.policy.checks import enough_queries
from kvassay.policy.kvpress.bridge import interpreter, peer
from kvassay.policy.kvpress.presses import Chain, parse
from kvassay.policy.views import CacheView, LayerView


@dataclass(frozen=True)
class Kvpress(Policy):
    """Keep what a press of kvpress keeps of the recorded keys, values and queries.

    press: a press, or one round another: AdaKVPress(SnapKVPress)
    options: of the presses, as window_size=32;kernel_size=7
    version: of kvpress; another one is refused
    """

    press: str = "SnapKVPress"
    options: str = ""
    version: str = "0.5.5"

    card: ClassVar[Card] = Card(
        name="kvpress",
        effects=frozenset({Effect.EVICT}),
        source="kvpress 0.5.5 (github.com/NVIDIA/kvpress), asked in a process of its own",
        summary="keeps what a press of kvpress keeps",
        evidence=frozenset({Evidence.KEYS, Evidence.VALUES, Evidence.QUERIES}),
        external=True,
        deviations=(
            "what a press only masks (AdaKVPress) is evicted here and counted as what it frees",
            "protected tokens score above all others; without protection the kept set is kvpress's own",
            "in a hybrid, the layers that PyramidKVPress spreads its budget over are the full ones alone",
        ),
        limits=(
            "needs kvpress's environment: make kvpress-setup; docs/kvpress.md lists the presses that can be asked",
            "presses that read queries know one scale, 1/sqrt(head_dim), and no soft-cap, sinks or partial rotation",
            "its time holds the way to another process and back: not a cost of the method",
        ),
    )

    def __post_init__(self) -> None:
        if self.chain.output:
            raise PolicyError(f"policy 'kvpress': {self.press} reads output projections; use kvpress-critical")

    @cached_property
    def chain(self) -> Chain:
        """The presses, outermost first."""
        return parse(self.press, self.options)

    @property
    def queries_needed(self) -> int:
        """What the press reads."""
        return self.chain.queries(EVERY_QUERY)

    def check_ready(self) -> None:
        """Raise `PolicyError` if there is no python with kvpress."""
        interpreter()

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Keep what the press leaves of each layer; `PolicyError` if it leaves more than the budget."""
        masks = {
            index: self.ask(layer, ordinal, len(cache.layers), budget.tokens, memory)["keep"]
            for ordinal, (index, layer) in enumerate(sorted(cache.layers.items()))
            if layer.tokens > budget.tokens
        }
        rows = sum(len(mask) for mask in masks.values())
        held = sum(int(mask.sum()) for mask in masks.values())
        if held > (budget.tokens + 1) * rows:
            raise BudgetError(
                f"kvpress's {self.press} keeps {held} tokens in {rows} heads, {budget.tokens} each may be"
            )
        return Decision({index: [Evict(mask.to(cache.layers[index].alive.device))] for index, mask in masks.items()})

    def ask(self, layer: LayerView, ordinal: int, layers: int, keep: int, memory: Memory) -> dict[str, Tensor]:
        """`keep` bool [kv_heads, tokens], and the press's `score` where it has one, of the `ordinal`-th of `layers`.

        Raises `PolicyError` for a layer that presses cannot be shown, and with what a press raises.
        """
        helper = peer()
        if helper.versions.get("kvpress") != self.version:
            raise PolicyError(
                f"policy 'kvpress' asks for kvpress {self.version}, {helper.python} has "
                f"{helper.versions.get('kvpress')}; install it there or say version=..."
            )
        tensors = self.shown(layer, memory)
        header: dict[str, Any] = {
            "press": list(self.chain.names),
            "options": dict(self.chain.options),
            "attention": self.chain.attention,
            "keep": keep,
            "ordinal": ordinal,
            "layers": layers,
            "q_heads": layer.layer.q_heads,
            "scale": layer.layer.scale,
            "seed": int(torch.randint(2**31, (1,), generator=memory.generator())),
        }
        found = helper.ask(header, tensors)
        mask = found.get("keep")
        if mask is None or mask.dtype != torch.bool or mask.shape != layer.alive.shape:
            form = "none" if mask is None else f"{mask.dtype} {list(mask.shape)}"
            wanted = list(layer.alive.shape)
            raise PolicyError(f"kvpress's {self.press}, layer {layer.index}: keep mask {form}, bool {wanted} needed")
        return found

    def shown(self, layer: LayerView, memory: Memory) -> dict[str, Tensor]:
        """What goes over: float32 keys, values and un-rotated queries [heads, tokens, dim]."""
        if not bool(layer.alive.all()) or layer.tokens != layer.length:
            raise PolicyError(f"policy 'kvpress' takes whole contexts, layer {layer.index} has been evicted from")
        if layer.keys.shape != layer.values.shape:
            raise PolicyError(f"policy 'kvpress': layer {layer.index} has keys and values of different size")
        found = {"keys": layer.keys.float(), "values": layer.values.float(), "forced": layer.protected}
        rope = layer.layer.rope
        if self.chain.rotation:
            self._check_attention(layer)
            if rope is not None:
                found["inv_freq"] = inverse_frequencies(rope)
        if wanted := self.queries_needed:
            queries = layer.queries(min(wanted, layer.length))
            enough_queries(self, layer, queries.q.shape[1], wanted)
            found["queries"] = unrotate(queries.q, queries.positions, rope).float()
        return found

    def _check_attention(self, layer: LayerView) -> None:
        """Raise `PolicyError` where a press would compute another attention than the model's."""
        about, dim = layer.layer, layer.keys.shape[-1]
        if about.softcap is not None or about.sinks:
            raise PolicyError(f"policy 'kvpress': {self.press} knows no soft-cap and no sinks, layer {layer.index} has")
        if about.rope is not None and (about.rope.interleaved or about.rope.dims != dim):
            raise PolicyError(
                f"policy 'kvpress': {self.press} rotates whole heads in halves, layer {layer.index} does not"
            )
