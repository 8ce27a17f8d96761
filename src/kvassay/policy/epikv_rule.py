"""EpiKV's rule: generated tokens are scored once by how the hidden state moved at them, and the lowest go."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvassay.cache.edits import KEEP_ALL, Decision, Evict
from kvassay.policy.base import Memory, Policy, State
from kvassay.policy.budget import Allowance
from kvassay.policy.checks import at_least, one_of
from kvassay.policy.motion import advance
from kvassay.policy.views import CacheView, LayerView, StepView


@dataclass(frozen=True)
class MotionEviction(Policy):
    """Score = rolling z-score of the hidden state's change at an early layer, less that at a late one; then frozen.

    The whole prompt and the newest min(128, budget / 4) tokens stay; the token of lowest score gives its slot, at
    every layer and head, to the next one.
    window: tokens of the rolling mean and deviation, the newest included (paper: 64)
    reading: what the budget counts: all tokens held, or generated ones alone (the paper can be read either way)
    """

    window: int = 64
    reading: Literal["total", "generated"] = "total"

    def __post_init__(self) -> None:
        at_least(self, window=2)
        one_of(self, "reading", "total", "generated")

    @abstractmethod
    def columns(self, memory: Memory) -> tuple[int, int]:
        """The early and the late layer, by their place among the tapped ones."""

    def not_applicable(self, context: int, longest: int, budget: Allowance) -> str | None:
        """Where the prompt alone fills the budget, or what follows never does."""
        cap = self.cap(budget)
        if cap <= context:
            return f"evicts generated tokens only, and the context's {context} tokens fill its budget of {cap}"
        if longest <= max(cap, context + self.newest(budget)):
            return (
                f"at most {longest} tokens come together: its budget of {cap} is never over-full, or all of the "
                f"{longest - context} later ones are among the newest {self.newest(budget)}, which stay"
            )
        return None

    def newest(self, budget: Allowance) -> int:
        """Newest tokens that always stay."""
        return max(min(128, budget.tokens // 4), budget.protection.recent)

    def cap(self, budget: Allowance) -> int:
        """Tokens that may be held."""
        return budget.tokens + (budget.context if self.reading == "generated" else 0)

    def observe(self, state: State, step: StepView) -> State:
        """z-scores of the new tokens, once; and the last hidden states and the windows of changes to go on with."""
        hidden = torch.stack([step.hidden[layer] for layer in sorted(step.hidden)])
        carried, z = advance(state, hidden, self.window)
        position = torch.tensor(step.positions, dtype=torch.int32)
        held = torch.isin(state.get("position", position[:0]), next(iter(step.cache.layers.values())).positions[0])
        return {
            **carried,
            "z": torch.cat([state.get("z", z[:, :0])[:, held], z], 1),
            "position": torch.cat([state.get("position", position[:0])[held], position]),
        }

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """Frozen scores, alike in every layer and head; the context's are above all: [kv_heads, tokens]."""
        early, late = self.columns(memory)
        scores = memory.state["z"][early] - memory.state["z"][late]
        table = torch.full((layer.length,), float(scores.max()) + 1, dtype=scores.dtype)
        table[memory.state["position"].long()] = scores
        return table[layer.positions.clamp(min=0)]

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Once the budget is full, the lowest score outside the protected parts goes; its slot is reused."""
        some = next(iter(cache.layers))
        layer, cap = cache.layers[some], self.cap(budget)
        if layer.tokens < cap:
            return KEEP_ALL
        positions = layer.positions[0]
        open_to = (positions >= cache.context) & (positions < cache.length - self.newest(budget))
        if not bool(open_to.any()):
            return KEEP_ALL
        at = int(scores[some][0].masked_fill(~open_to, torch.inf).argmin())
        victim = int(positions[at])
        return Decision({i: [Evict(shown.positions != victim)] for i, shown in cache.layers.items()}, reuse=victim)
