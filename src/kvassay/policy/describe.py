"""A policy's card and parameters as plain data, for tables and JSON."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

from kvassay.policy.base import Policy


def describe(policy: type[Policy] | Policy) -> dict[str, Any]:
    """Every field of the card of a class, or of a composition, sets as sorted lists, with `exact`, `per_step` and the
    parameters."""
    card = policy.card
    plain = {f.name: _plain(getattr(card, f.name)) for f in dataclasses.fields(card)}
    return {**plain, "exact": card.exact, "per_step": card.per_step, "parameters": parameters(policy)}


def parameters(policy: type[Policy] | Policy) -> dict[str, dict[str, Any]]:
    """Each parameter's type and default; a default of None means that it must be given. With a part's name and a dot
    before it in a composition."""
    if isinstance(policy, Policy):
        named = ((part.card.name, parameters(type(part))) for part in policy.parts)
        return {f"{name}.{key}": about for name, known in named for key, about in known.items()}
    hints = get_type_hints(policy)
    return {
        f.name: {
            "type": _type(hints[f.name]),
            "default": None if f.default is dataclasses.MISSING else f.default,
        }
        for f in dataclasses.fields(policy)  # type: ignore[arg-type]
    }


def _type(hint: Any) -> str:
    """A type's name; the allowed values of a Literal."""
    return hint.__name__ if isinstance(hint, type) else " | ".join(map(str, get_args(hint))) or str(hint)


def _plain(value: object) -> Any:
    if isinstance(value, frozenset):
        return sorted(v if isinstance(v, int) else str(v) for v in value)
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, bool | int | float) else str(value)
