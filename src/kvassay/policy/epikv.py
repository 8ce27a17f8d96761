"""EpiKV (Kolawole, Smith 2026, arXiv 2606.26472): evict generated tokens by how the hidden state moved at them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvassay.cache.edits import KEEP_ALL, Decision, Evict
from kvassay.errors import PolicyError
from kvassay.policy.base import Memory, Policy, State
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Card, Effect, Evidence, When
from kvassay.policy.checks import at_least, one_of
from kvassay.policy.motion import advance
from kvassay.policy.views import CacheView, LayerView, StepView


@dataclass(frozen=True)
class EpiKV(Policy):
    """Score = rolling z-score of the hidden state's change at an early layer, less that at a late one; then frozen.

    The whole prompt and the newest min(128, budget / 4) tokens stay; the token of lowest score gives its slot, at
    every layer and head, to the next one.
    early, late: decoder layers; below 1 a fraction of the depth (paper: 10 and 21 of 32, for one model)
    window: tokens of the rolling mean and deviation, the newest included (paper: 64)
    reading: what the budget counts: all tokens held, or generated ones alone (the paper can be read either way)
    """

    early: float = 0.31
    late: float = 0.66
    window: int = 64
    reading: Literal["total", "generated"] = "total"

    card: ClassVar[Card] = Card(
        name="epikv-uncal",
        effects=frozenset({Effect.EVICT}),
        source="EpiKV, arXiv 2606.26472 v2, sections 3 and 4",
        summary="evicts generated tokens at which hidden states of two layers moved least, slots reused; prompt stays",
        when=frozenset({When.EVERY_STEP}),
        evidence=frozenset({Evidence.HIDDEN}),
        reconstruction=True,
        gaps=(
            "the layers are the paper's depths, not calibrated on this model",
            "h is the output of the decoder layer; eps is 1e-6; the deviation is the population's",
            "the first token after the context has no change and scores 0; early ones use the window so far",
            "of equal scores the older token goes",
        ),
        deviations=(
            "positions stay true; the published loop derives them from a cache counter that stops at the budget",
            "tokens of a question asked after the context count as generated",
        ),
        limits=(
            "does nothing to a prompt: where that alone fills the budget it is not applicable",
            "scores are frozen: a token that becomes relevant later cannot come back",
            "compare with random and ~flipped, ~shuffled: protecting the prompt may be all of its gain",
        ),
    )

    def __post_init__(self) -> None:
        at_least(self, window=2, early=0, late=0)
        one_of(self, "reading", "total", "generated")
        if self.early == self.late:
            raise PolicyError(f"policy '{self.card.name}': early and late are both {self.early:g}")

    def taps_in(self, layers: int) -> frozenset[int]:
        """The early and the late layer; `PolicyError` if they are one in so shallow a model."""
        taps = frozenset(round(at * layers) if at < 1 else int(at) for at in (self.early, self.late))
        if len(taps) < 2:
            raise PolicyError(
                f"policy '{self.card.name}': early={self.early:g} and late={self.late:g} are one layer of {layers}"
            )
        return taps

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
        """Score the new tokens once, and carry on the last hidden states and the windows of changes."""
        early, late = (step.hidden[at] for at in self._order(step.hidden))
        carried, score = advance(state, early, late, self.window)
        position = torch.tensor(step.positions, dtype=torch.int32)
        held = torch.isin(state.get("position", position[:0]), next(iter(step.cache.layers.values())).positions[0])
        return {
            **carried,
            "score": torch.cat([state.get("score", score[:0])[held], score]),
            "position": torch.cat([state.get("position", position[:0])[held], position]),
        }

    def _order(self, tapped: Iterable[int]) -> tuple[int, ...]:
        """The tapped layers, early and late, whichever is deeper."""
        return tuple(sorted(tapped, reverse=self.early > self.late))

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """Frozen scores, alike in every layer and head; the context's are above all: [kv_heads, tokens]."""
        table = torch.full((layer.length,), float(memory.state["score"].max()) + 1)
        table[memory.state["position"].long()] = memory.state["score"]
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
