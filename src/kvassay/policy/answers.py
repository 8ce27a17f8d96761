"""What a policy's own code answers: its errors told as the policy's, its scores, edits, side data and state checked."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from kvassay.cache.edits import Bias, Decision, Edit, Evict, LowRank, Merge
from kvassay.errors import BudgetError, CacheError, KvassayError, LayoutError, PolicyError
from kvassay.policy.base import Policy, State
from kvassay.policy.card import Approximates, Effect
from kvassay.policy.views import LayerView

SideData = Mapping[str, Tensor]
"""Of blocks, by name: [blocks, ...], mostly [blocks, kv_heads, ...]."""
_HERE = __name__.partition(".")[0]


@contextmanager
def answering(policy: Policy, method: str, layer: int | None = None) -> Iterator[None]:
    """A call of a policy's method: `PolicyError` on one line where the code of a plug-in fails in it.

    The line says where in the plug-in's file; the original error is its cause. Typed errors, and failures in code of
    this package, pass as they are: the first are said well already, and the second are not the plug-in's.
    """
    try:
        yield
    except KvassayError:
        raise
    except Exception as error:
        place = _place(policy, error)
        if place is None:
            raise
        where = f"policy '{policy.card.name}', {method}" + ("" if layer is None else f" of layer {layer}")
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise PolicyError(f"{where}: {said.removesuffix(':')} ({place})") from error


@contextmanager
def of_arm(label: str) -> Iterator[None]:
    """What an arm asks of its budget or of the cache in vain: the same error, with the arm's name before it."""
    try:
        yield
    except (BudgetError, CacheError, LayoutError) as error:
        raise type(error)(f"arm '{label}': {error}") from error


def _place(policy: Policy, error: Exception) -> str | None:
    """File and line of the plug-in's innermost frame; None if code of this package was called from there."""
    kinds = {kind for part in policy.parts for kind in type(part).__mro__}
    plugins = {kind.__module__.partition(".")[0] for kind in kinds} - {_HERE, "builtins"}
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        owner = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if owner == _HERE:
            return None
        if owner in plugins:
            return f"{frame.f_code.co_filename}:{line}"
    return None


def scores_of(score: Tensor, shown: LayerView) -> Tensor:
    """The scores themselves; `PolicyError` if a policy answered with anything but a tensor."""
    if not isinstance(score, Tensor):
        raise PolicyError(
            f"policy '{shown.card.name}' scored layer {shown.index} with {type(score).__name__}, "
            f"a tensor [{shown.kv_heads}, {shown.tokens}] needed"
        )
    return score


def checked_scores(score: Tensor, shown: LayerView) -> Tensor:
    """Scores float [kv_heads, tokens] of a layer; `PolicyError` for another shape, or NaN at a live token."""
    if tuple(scores_of(score, shown).shape) != (shown.kv_heads, shown.tokens):
        raise PolicyError(
            f"policy '{shown.card.name}' scored layer {shown.index} with shape {list(score.shape)}, "
            f"[{shown.kv_heads}, {shown.tokens}] needed"
        )
    if not score.is_floating_point():
        raise PolicyError(
            f"policy '{shown.card.name}' scored layer {shown.index} in {score.dtype}, floating point needed"
        )
    wrong = int((~torch.isfinite(score[shown.alive])).sum())
    if wrong:
        raise PolicyError(
            f"policy '{shown.card.name}' scored {wrong} of {int(shown.alive.sum())} tokens of layer {shown.index} "
            "NaN or infinite; every live token needs a finite score"
        )
    return score


def checked_side(policy: Policy, given: SideData, blocks: int, old: SideData) -> SideData:
    """What `summarize` returned of new blocks; `PolicyError` unless it is the same tensors [blocks, ...], by
    name, type and shape, as those of the blocks before (`old`; empty: these are the first)."""
    if not (isinstance(given, Mapping) and all(isinstance(one, Tensor) for one in given.values())):
        raise PolicyError(
            f"policy '{policy.card.name}': summarize returned {type(given).__name__}, not a dict of tensors by name"
        )
    for name, one in given.items():
        if one.shape[:1] != (blocks,):
            raise PolicyError(
                f"policy '{policy.card.name}': side data '{name}' has shape {list(one.shape)}, "
                f"[{blocks} blocks, ...] needed"
            )
    kinds = [{name: (one.dtype, *one.shape[1:]) for name, one in side.items()} for side in (old or given, given)]
    if kinds[0] != kinds[1]:
        raise PolicyError(
            f"policy '{policy.card.name}': summarize returned {kinds[1]}, and {kinds[0]} of the blocks before; name, "
            "type and shape of side data stay the same"
        )
    return given


def checked_state(policy: Policy, state: State) -> State:
    """What `observe` returned; `PolicyError` if it is no dict of tensors by name."""
    if not (isinstance(state, Mapping) and all(isinstance(one, Tensor) for one in state.values())):
        raise PolicyError(
            f"policy '{policy.card.name}': observe returned {type(state).__name__}, not a dict of tensors by name"
        )
    return state


def checked_edits(policy: Policy, decision: Decision) -> Decision:
    """The decision; `PolicyError` for what is no edit, or one that does or changes what the card does not declare."""
    if not isinstance(decision, Decision):
        raise PolicyError(f"policy '{policy.card.name}': decide returned {type(decision).__name__}, not a Decision")
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
    for fact, value in decision.facts.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise PolicyError(f"policy '{name}': the fact '{fact}' must be a finite number, got {value!r:.60}")
    return decision


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
