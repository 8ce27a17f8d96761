"""Every policy's card as one Markdown page: what it does, where it is from, what it needs and costs, how it fails."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from kvassay.policy.base import Policy
from kvassay.policy.describe import parameters
from kvassay.policy.needs import engine_needs

HEAD = """# Method cards

Generated from the policies' cards and docstrings by `kvassay policies --markdown`; do not edit.

- **exact**: attention over what is retained is exact; other methods form a second comparison.
- **reconstruction**: the source leaves something open that was filled in; each gap is listed.
- **reference**: a yardstick that no engine could run.
- **external**: another project's code decides, in an environment of its own.
"""


def markdown(policies: Iterable[type[Policy]]) -> str:
    """The page, policies in the order given."""
    return "\n".join([HEAD, *(_card(policy) for policy in policies)])


def _card(policy: type[Policy]) -> str:
    card = policy.card
    marks = [
        word
        for word, true in (
            ("exact", card.exact),
            ("reconstruction", card.reconstruction),
            ("reference", card.reference),
            ("external", card.external),
        )
        if true
    ]
    approximated = f"approximates {', '.join(sorted(card.approximates))}" if card.approximates else ""
    facts = [
        ("source", card.source),
        ("effect", ", ".join(sorted(card.effects)) + f"; unit: {card.unit}"),
        ("kind", ", ".join([*marks, *filter(None, [approximated])])),
        ("acts on", ", ".join(sorted(card.acts_on)) + " layers"),
        ("when", ", ".join(sorted(card.when))),
        ("budget", ", ".join(sorted(card.budgets)) or "none: its size is a parameter"),
        ("evidence", ", ".join(sorted(card.evidence)) or "none"),
    ]
    lists = [
        ("Gaps filled", card.gaps),
        ("Deviations", card.deviations),
        ("Limits and known failures", card.limits),
        ("What an engine needs", [f"{need.name}: {need.what}" for need in engine_needs(card, ())]),
    ]
    text = [f"## {card.name}", "", card.summary[0].upper() + card.summary[1:] + ".", ""]
    text += [f"- **{name}**: {value}" for name, value in facts if value]
    text += _parameters(policy)
    for title, items in lists:
        if items:
            text += ["", f"{title}:", "", *(f"- {item}" for item in items)]
    return "\n".join([*text, ""])


def _parameters(policy: type[Policy]) -> list[str]:
    """The docstring's words on the parameters, and their types and defaults."""
    known = parameters(policy)
    if not known:
        return []
    table = [f"| `{name}` | {about['type'].replace('|', 'or')} | {about['default']} |" for name, about in known.items()]
    words = inspect.cleandoc(policy.__doc__ or "")
    return ["", words.replace("\n", "  \n"), "", "| parameter | type | default |", "|---|---|---|", *table]
