"""A lane: one arm's sequence on its way through a replay, with what the policy carries along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from kvassay.cache.paged import PagedCache
from kvassay.errors import PolicyError
from kvassay.layout.model import Layer, Layout
from kvassay.policy.base import Memory, Policy, State
from kvassay.policy.budget import Allowance
from kvassay.policy.readset import ReadSet
from kvassay.policy.views import Queries
from kvassay.replay.arms import Arm


@dataclass
class Traffic:
    """KV read traffic of decode steps, summed over tokens processed."""

    tokens: int = 0
    bytes: float = 0.0
    """K, V, encoded data, metadata, side data and scoring scans, at the layout's `kv_dtype`."""
    selected: float = 0.0
    """Tokens read per KV head, mean over the scoped layers, summed over tokens processed."""

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes one decoded token reads."""
        return self.bytes / self.tokens if self.tokens else 0.0

    @property
    def selected_per_token(self) -> float:
        """Mean tokens per KV head and scoped layer that one decoded token reads."""
        return self.selected / self.tokens if self.tokens else 0.0


@dataclass
class Lane:
    """One sequence of a `PagedCache` under one arm. `fork` shares everything by reference."""

    arm: Arm
    seq: int
    cache: PagedCache
    allowance: Allowance
    memory: Memory
    scope: frozenset[int]
    """Layers the policy may act on."""
    sinks: Mapping[int, Tensor] = field(default_factory=dict)
    """Logit of each query head's attention sink, [q_heads], per layer that has sinks."""
    side: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    """Side data per layer, as `summarize` returned it, over the full blocks so far."""
    queries: dict[int, Queries] = field(default_factory=dict)
    """The last queries per layer, for policies that declare them."""
    previous: dict[int, ReadSet] = field(default_factory=dict)
    reuse: int | None = None
    """Position whose slot the next token takes."""
    traffic: Traffic = field(default_factory=Traffic)
    peak_bytes: float = 0.0
    seconds: float = 0.0
    """Wall seconds spent in the policy and in its edits."""
    touched: float = 0.0
    """Bytes the policy touched to score and edit (not to read)."""
    generated: int = 0
    """Tokens since the context was compressed."""

    @property
    def policy(self) -> Policy:
        """The arm's policy."""
        return self.arm.policy

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that hold K/V of their own."""
        return tuple(layer.index for layer in self.cache.layout.layers if storing(layer))

    @property
    def length(self) -> int:
        """Tokens so far; the next one's position."""
        return self.cache.ledger.length(self.seq)

    @property
    def stepwise(self) -> bool:
        """Whether this lane must be fed one token at a time."""
        return self.policy.card.per_step or self.policy.writes_observe or self.arm.again

    def fork(self) -> Lane:
        """The same lane once more, with counters of its own; K/V shared by reference count."""
        return replace(
            self,
            seq=self.cache.fork(self.seq),
            side=dict(self.side),
            queries=dict(self.queries),
            previous=dict(self.previous),
            traffic=Traffic(),
            peak_bytes=0.0,
        )

    def free(self) -> None:
        """Give the sequence back."""
        self.cache.free(self.seq)

    def with_state(self, state: State) -> None:
        """Replace what the policy carries."""
        self.memory = replace(self.memory, state=state)


def scope_of(layout: Layout, policy: Policy) -> frozenset[int]:
    """Layers with a cache of their own whose kind the policy's card names.

    `PolicyError` if the model has none, or lacks a layer that the card taps.
    """
    card = policy.card
    scope = frozenset(layer.index for layer in layout.layers if storing(layer) and layer.kind in card.acts_on)
    if not scope:
        kinds = ", ".join(sorted({layer.kind for layer in layout.layers}))
        raise PolicyError(f"policy '{card.name}' acts on {', '.join(sorted(card.acts_on))}, the model has {kinds}")
    missing = sorted(card.taps - set(range(len(layout.layers))))
    if missing:
        raise PolicyError(f"policy '{card.name}' taps layer {missing[0]}, the model has {len(layout.layers)} layers")
    return scope


def storing(layer: Layer) -> bool:
    """Whether the layer holds K/V of its own."""
    return layer.cache_of is None
