"""Control twins of a policy: the same method with its score turned round, its ranks shuffled, or its merging off.

A twin is a subclass made on the fly with the parent's parameters, so it sees the same evidence, costs the same
scan and obeys the same budget. Its name is the parent's with a suffix: ``snapkv~flipped(window=32)``.
A method's own always-kept tokens are part of its score, so flipping and shuffling move them too; the
experiment's protection holds for every twin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvassay.cache.edits import Bias, Decision, Merge
from kvassay.errors import PolicyError, did_you_mean
from kvassay.policy.answers import scores_of
from kvassay.policy.base import Memory, Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Card, Effect
from kvassay.policy.views import CacheView, LayerView


def sign_flipped(policy: Policy) -> Policy:
    """The same policy, keeping what it would evict; `PolicyError` if it has no score."""
    return twin(type(policy), "flipped")(**policy.parameters)


def shuffled(policy: Policy) -> Policy:
    """The same policy, its scores dealt out at random to the live tokens of each head."""
    return twin(type(policy), "shuffled")(**policy.parameters)


def merge_off(policy: Policy) -> Policy:
    """The same policy without its merges and the biases that go with them; `PolicyError` if it merges nothing."""
    return twin(type(policy), "merge-off")(**policy.parameters)


def twin(parent: type[Policy], kind: str) -> type[Policy]:
    """The twin class of a policy class, made once: `kind` is flipped, shuffled or merge-off."""
    if kind not in _BODIES:
        raise PolicyError(f"policy '{parent.card.name}' has no twin '{kind}'{did_you_mean(kind, _BODIES)}")
    if (parent, kind) not in _MADE:
        _MADE[parent, kind] = _make(parent, kind)
    return _MADE[parent, kind]


def _make(parent: type[Policy], kind: str) -> type[Policy]:
    body = _BODIES[kind](parent)
    card = dataclasses.replace(body.pop("card", parent.card), name=f"{parent.card.name}~{kind}")
    body |= {
        "card": card,
        "__doc__": card.summary,
        "__module__": parent.__module__,
        "fitted_by": property(lambda self: parent(**self.parameters).fitted_by),
        "__reduce__": lambda self: (_rebuild, (parent, kind, self.parameters)),
    }
    made = type(f"{parent.__name__}_{kind.replace('-', '_')}", (parent,), body)
    return dataclasses.dataclass(frozen=True)(made)


def _rebuild(parent: type[Policy], kind: str, parameters: dict[str, Any]) -> Policy:
    """Unpickle: the class is made again in the other process."""
    return twin(parent, kind)(**parameters)


def _flipped(parent: type[Policy]) -> dict[str, Any]:
    def score(self: Policy, layer: LayerView, memory: Memory) -> Tensor:
        return -scores_of(parent.score(self, layer, memory), layer)

    return {"score": score, "card": _summary(_scorer(parent, "flip"), "with the sign of its score flipped")}


def _shuffled(parent: type[Policy]) -> dict[str, Any]:
    def score(self: Policy, layer: LayerView, memory: Memory) -> Tensor:
        true, alive = scores_of(parent.score(self, layer, memory), layer), layer.alive
        draw = torch.rand(alive.shape, generator=memory.generator())
        source = draw.masked_fill(~alive, 2.0).argsort(dim=1)
        rank = (~alive).int().argsort(dim=1, stable=True)
        return true.scatter(1, rank, true.gather(1, source))

    return {"score": score, "card": _summary(_scorer(parent, "shuffle"), "with its scores shuffled over the tokens")}


def _merge_off(parent: type[Policy]) -> dict[str, Any]:
    if Effect.MERGE not in parent.card.effects:
        raise PolicyError(f"policy '{parent.card.name}' merges nothing that could be switched off")

    def decide(
        self: Policy, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance
    ) -> Decision:
        full = parent.decide(self, cache, scores, memory, budget)
        kept = {i: [e for e in edits if not isinstance(e, Merge | Bias)] for i, edits in full.edits.items()}
        return dataclasses.replace(full, edits=kept)

    effects = parent.card.effects - {Effect.MERGE}
    encodes = effects & {Effect.QUANTIZE, Effect.LOW_RANK}
    left = parent.card.approximates if encodes else frozenset()
    card = dataclasses.replace(parent.card, effects=effects, approximates=left)
    return {"decide": decide, "card": _summary(card, "with merging switched off")}


def _scorer(parent: type[Policy], verb: str) -> Card:
    if parent.score is Policy.score:
        raise PolicyError(f"policy '{parent.card.name}' has no score to {verb}")
    return parent.card


def _summary(card: Card, change: str) -> Card:
    return dataclasses.replace(card, summary=f"control twin: {card.name} {change}")


_MADE: dict[tuple[type[Policy], str], type[Policy]] = {}
_BODIES: dict[str, Callable[[type[Policy]], dict[str, Any]]] = {
    "flipped": _flipped,
    "shuffled": _shuffled,
    "merge-off": _merge_off,
}
