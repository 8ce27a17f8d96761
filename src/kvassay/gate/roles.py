"""What kind of work a workload is, and what each kind may say of a policy.

One needle in a haystack is found by policies that lose everything else, so a single-needle workload may only speak
against a policy. For it speak several kinds of work together, each of which another habit of a policy breaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "needle_single": "single-needle",
        "needle_multikey": "multi-key",
        "needle_generated": "generated-needle",
        "kv_short": "multi-key",
        "kv_uuid": "multi-key",
        "copy": "copy",
        "tracking": "tracing",
        "words": "aggregation",
        "chain": "reasoning-shaped",
        "scratchpad": "reasoning-shaped",
        "jsonl": "reasoning-shaped",
        "prose": "prose",
        "prose_numbered": "prose",
    }
)
"""Kind by workload."""

VETO_ONLY = frozenset({"single-needle", "generated-needle", "prose"})
"""Kinds that may never speak for a policy."""

TOGETHER = ("multi-key", "copy", "tracing", "reasoning-shaped")
"""Kinds that must all be there, and pass, before anything is promoted."""


def lacking(workloads: Iterable[str]) -> tuple[str, ...]:
    """Kinds of `TOGETHER` that these workloads leave out."""
    there = {KINDS[name] for name in workloads}
    return tuple(kind for kind in TOGETHER if kind not in there)


def workloads_of(kind: str) -> tuple[str, ...]:
    """Workloads of a kind."""
    return tuple(name for name, found in KINDS.items() if found == kind)
