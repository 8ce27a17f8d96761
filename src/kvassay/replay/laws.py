"""What a decision may not do, whoever made it: leave the policy's scope, do what its card does not declare, move tokens
in a pass, drop protected ones."""

from __future__ import annotations

import torch
from torch import Tensor

from kvassay.cache.edits import Bias, Decision, Edit, Evict, LowRank, Merge, Quantize
from kvassay.errors import PolicyError
from kvassay.policy.base import Policy
from kvassay.policy.card import Approximates, Effect, When
from kvassay.policy.views import CacheView


def check_scope(policy: Policy, cache: CacheView, decision: Decision) -> None:
    """Raise `PolicyError` if a layer is edited that the policy was not shown."""
    outside = sorted(set(decision.edits) - set(cache.layers))
    if outside:
        raise PolicyError(
            f"policy '{policy.card.name}' edits layer {outside[0]}, which its card does not act on "
            f"({', '.join(sorted(policy.card.acts_on))})"
        )


def check_effects(policy: Policy, decision: Decision) -> None:
    """Raise `PolicyError` for what is no edit, or one whose effect or approximation the card does not declare."""
    name, card = policy.card.name, policy.card
    for index, edits in decision.edits.items():
        if not isinstance(edits, list | tuple):
            raise PolicyError(f"policy '{name}': the edits of layer {index} must be a list, got {type(edits).__name__}")
        for edit in edits:
            kind = type(edit).__name__
            if not isinstance(edit, Edit):
                raise PolicyError(f"policy '{name}': layer {index} has a {kind} among its edits")
            effect, approximated = _does(edit)
            if effect is not None and effect not in card.effects:
                raise PolicyError(
                    f"policy '{name}' answers with {kind}, and its card's effects are "
                    f"{', '.join(sorted(card.effects))}: declare '{effect}'"
                )
            unsaid = sorted(approximated - card.approximates)
            if unsaid:
                raise PolicyError(
                    f"policy '{name}' answers with {kind}, which changes {' and '.join(unsaid)}: its card's "
                    "`approximates` must say so, or its attention would pass for exact"
                )


def _does(edit: Edit) -> tuple[Effect | None, set[Approximates]]:
    """The effect that an edit is, and what is not as the model wrote it afterwards."""
    if isinstance(edit, Evict):
        return Effect.EVICT, set()
    if isinstance(edit, Bias):
        return None, {Approximates.LOGITS}
    if isinstance(edit, Merge):
        return Effect.MERGE, {Approximates.VALUES, *(() if edit.values_only else (Approximates.KEYS,))}
    if isinstance(edit, LowRank):
        effect, keys, values = Effect.LOW_RANK, edit.key_encode is not None, edit.value_encode is not None
    else:
        effect = Effect.QUANTIZE
        keys, values = (isinstance(bits, Tensor) or bits != 16 for bits in (edit.key_bits, edit.value_bits))
    sides = {Approximates.KEYS: keys, Approximates.VALUES: values}
    return effect, {side for side, changed in sides.items() if changed}


def check_order(policy: Policy, cache: CacheView, decision: Decision) -> None:
    """Raise `PolicyError` if tokens would move where the model's own index chooses blocks of neighbouring tokens."""
    moves = "compacts" if decision.compact else "reuses a slot" if decision.reuse is not None else None
    for layer in cache.layers.values():
        top = layer.layer.topk
        if moves is not None and top is not None and top.unit > 1:
            raise PolicyError(
                f"policy '{policy.card.name}' {moves}, but in layer {layer.index} the model's index chooses blocks of "
                f"{top.unit} tokens by where they are"
            )


def check_moment(policy: Policy, cache: CacheView, decision: Decision) -> None:
    """Raise `PolicyError` for anything but encoding of what has just been written, in the middle of a pass."""
    if cache.moment is not When.ON_WRITE:
        return
    edits = [edit for edits in decision.edits.values() for edit in edits]
    other = [type(edit).__name__ for edit in edits if not isinstance(edit, Quantize | LowRank)]
    other += ["compaction"] if decision.compact else ["slot reuse"] if decision.reuse is not None else []
    if other:
        raise PolicyError(
            f"policy '{policy.card.name}' answers with {other[0]} as tokens are written: they may only be encoded then "
            "(Quantize, LowRank); decide after prefill, every step or every n tokens instead"
        )


def check_protection(policy: Policy, cache: CacheView, decision: Decision) -> None:
    """Raise `PolicyError` if a protected token would go: protection is the experiment's, equal for every arm."""
    for index, edits in decision.edits.items():
        layer = cache.layers[index]
        for edit in edits:
            gone = _dropped(edit, layer.tokens)
            lost = 0 if gone is None else int((layer.protected & gone).sum())
            if lost:
                raise PolicyError(
                    f"policy '{policy.card.name}' drops {lost} of {int(layer.protected.sum())} protected tokens of "
                    f"layer {index} (sink {layer.protection.sink}, recent {layer.protection.recent}; all KV heads "
                    "counted): keep `layer.protected`"
                )


def _dropped(edit: Edit, tokens: int) -> Tensor | None:
    """What an edit lets go, bool [kv_heads, tokens] or [tokens]; None for nothing.

    A wrong shape is left to the cache, which says so.
    """
    if isinstance(edit, Evict):
        return ~edit.keep.bool() if edit.keep.shape[-1:] == (tokens,) else None
    if isinstance(edit, Merge):
        return edit.into >= 0 if edit.into.shape[-1:] == (tokens,) else None
    if not isinstance(edit, Quantize):
        return None
    sides = (edit.value_bits, edit.key_bits if edit.key_axis == "token" else None)
    none = [bits == 0 for bits in sides if isinstance(bits, Tensor) and bits.shape[-1:] == (tokens,)]
    if not none:
        return None
    gone = torch.stack(torch.broadcast_tensors(*none)).any(0)
    return gone if edit.tokens is None else gone & edit.tokens.bool()
