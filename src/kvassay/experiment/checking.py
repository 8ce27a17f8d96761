"""Checking a finished trace set: what was asked, taken from the plan and the recorded contexts, against what came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvassay.experiment.folder import RunFolder
from kvassay.experiment.plan import Plan, TraceSet
from kvassay.measure.aggregate import Cell
from kvassay.measure.checks import ArmFacts, ContextFacts, Finding, SetFacts
from kvassay.measure.inspect import inspect
from kvassay.measure.result import BranchResult
from kvassay.policy.budget import Protection
from kvassay.policy.card import STEPS, Effect, Prefill
from kvassay.replay.arms import Arm
from kvassay.trace.reader import Trace
from kvassay.workload.framing import Tokenizer, frame

SHOWN_IDS = 16
"""Token ids looked at, from the start of a context."""


def opening_of(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """How texts of a tokenizer begin, for the manifest: `opening` (token ids) and `bos` (its id, None for none)."""
    if tokenizer is None:
        return {"opening": [], "bos": None}
    return {"opening": list(frame(tokenizer).prefix_ids), "bos": tokenizer.bos_token_id}


def check_set(
    folder: RunFolder,
    plan: Plan,
    trace_set: TraceSet,
    rows: Sequence[BranchResult],
    cells: Sequence[Cell],
    models: Sequence[Mapping[str, Any]],
) -> tuple[Finding, ...]:
    """All findings about a trace set; `models` are the manifest's, in the plan's order."""
    order = list(dict.fromkeys(item.model for item in plan.trace_sets))
    about = models[order.index(trace_set.model)]
    protection = plan.experiment.protection
    facts = SetFacts(
        arms={arm.label: _arm(arm) for arm in plan.arms},
        contexts=[_context(folder, name, about) for name in dict.fromkeys(row.trace for row in rows)],
        query_aware=trace_set.workload.query_aware,
        free_tokens=plan.protocol.free_tokens,
        block_size=plan.protocol.block_size,
        protection=Protection(protection.sink, protection.recent),
    )
    return inspect(rows, cells, facts)


def _arm(arm: Arm) -> ArmFacts:
    card = arm.policy.card
    return ArmFacts(
        label=arm.label,
        policy=card.name,
        parameters=arm.policy.parameters,
        budget=arm.budget,
        own_prefill=arm.prefill is Prefill.OWN,
        reference=card.reference,
        evicts_only=card.exact and card.effects == {Effect.EVICT},
        decides_later=arm.policy.decides_at(*STEPS),
    )


def _context(folder: RunFolder, name: str, model: Mapping[str, Any]) -> ContextFacts:
    ids = Trace.open(folder.traces / name).prefix.token_ids[:SHOWN_IDS].tolist()
    return ContextFacts(name, tuple(ids), tuple(model["opening"]), model["bos"])
