"""What a decision may not do, whoever made it: leave the policy's scope, move tokens in a pass, drop protected ones."""

from __future__ import annotations

import torch
from torch import Tensor

from kvassay.cache.edits import Decision, Edit, Evict, LowRank, Merge, Quantize
from kvassay.errors import PolicyError
from kvassay.policy.base import Policy
from kvassay.policy.card import When
from kvassay.policy.views import CacheView


def check_scope(policy: Policy, cache: CacheView, decision: Decision) -> None:
    """Raise `PolicyError` if a layer is edited that the policy was not shown."""
    outside = sorted(set(decision.edits) - set(cache.layers))
    if outside:
        raise PolicyError(
            f"policy '{policy.card.name}' edits layer {outside[0]!r}, which its card does not act on "
            f"({', '.join(sorted(policy.card.acts_on))})"
        )


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
