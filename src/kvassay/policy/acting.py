"""On which layers of a model a policy may act, by its card and by what the attention state there allows."""

from __future__ import annotations

from collections.abc import Sequence

from kvassay.cache.rope import not_undone
from kvassay.layout.model import Layer, Layout
from kvassay.policy.applicability import judged, state_of
from kvassay.policy.base import Policy
from kvassay.policy.card import Card, Effect

PER_TOKEN = ("latent", "block_sparse")
"""Kinds that store a state per token, as full layers do: a card for those covers them, unless something is objected."""
CALLED = {"block_sparse": "block-sparse"}


def may_act(card: Card, layer: Layer) -> bool:
    """Whether a policy acts on a layer that holds a cache of its own."""
    if objection(card, layer) is not None:
        return False
    return layer.kind in card.acts_on or (layer.kind in PER_TOKEN and "full" in card.acts_on)


def objection(card: Card, layer: Layer) -> str | None:
    """Why the layer's attention state is not for this method, though its card may name the kind; None if it is."""
    state = state_of(layer)
    if state is None or layer.kind not in (*PER_TOKEN, "pooled"):
        return None
    cell = judged(card, state)
    return None if cell.answer == "applicable" else f"{cell.answer}: {cell.reason}"


def refusal(policy: Policy, layout: Layout) -> str | None:
    """Why a policy has no place in a model, by the state of the layers that it objects to; None if it has one.

    A method that would act on a model's few plain layers alone is refused as well: the rest would make it look dense.
    So is one that finds no layer to act on; dense, which acts on nothing, fits every model.
    """
    for part in policy.parts:
        layers = [layer for layer in layout.storing if objection(part.card, layer) is not None]
        if layers:
            return f"{objection(part.card, layers[0])} ({_count(layers, layout.storing)})"
        if part.unrotates:
            mine = [layer for layer in layout.storing if may_act(part.card, layer)]
            layers = [layer for layer in mine if not_undone(layer.rope) is not None]
            if layers:
                return f"blocked: {not_undone(layers[0].rope)} ({_count(layers, layout.storing)})"
    card = policy.card
    if Effect.NONE in card.effects or any(may_act(card, layer) for layer in layout.storing):
        return None
    kinds = ", ".join(sorted({layer.kind for layer in layout.layers}))
    return f"it acts on {', '.join(sorted(card.acts_on))}, the model has {kinds}"


def _count(layers: Sequence[Layer], of: Sequence[Layer]) -> str:
    return f"{len(layers)} of {len(of)} layers, {CALLED.get(layers[0].kind, layers[0].kind)}"
