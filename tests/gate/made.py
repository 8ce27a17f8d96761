"""Hand-made evidence: eight contexts per workload, one candidate that deserves promotion, and the arms beside it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvassay.experiment.arminfo import ArmInfo
from kvassay.experiment.results import SetResult
from kvassay.gate.evidence import SetEvidence
from kvassay.gate.schema import Gate, parse_gate
from kvassay.measure.aggregate import aggregate
from kvassay.measure.checks import Finding
from kvassay.measure.cost import CostResult
from kvassay.measure.latency import LatencyResult
from kvassay.measure.result import RECLAIM_MODES, BranchResult
from tests.rows import row
from tests.runs import arm

GATE = """
[gate]
name = "hand"

[samples]
contexts = 8

[roles]
promote = ["needle_multikey", "copy", "tracking", "chain"]
veto = ["needle_single"]

[[quality]]
metric = "top1"
margin = 0.1
evidence = ["measured"]

[[reduction]]
of = "freed_bytes"
reclaim = ["whole_block", "compaction"]
layers = "growing"
at_least = 0.5
evidence = ["measured"]
"""

CAND = "cand keep=0.25"
RANDOM = "random keep=0.25"
WORKLOADS = ("needle_multikey", "copy", "tracking", "chain")
CONTEXTS = 8

ARMS = {
    info.label: info
    for info in (
        arm("dense"),
        arm("dense'"),
        arm(RANDOM),
        arm("recency keep=0.25"),
        arm("streaming keep=0.25"),
        arm("hindsight keep=0.25", reference=True),
        arm("fp8", exact=False),
        arm("paged-eviction keep=0.25"),
        arm(CAND, always=False, effects=("evict",), when=("after_prefill",), acts_on=("full",)),
    )
}

# top-1 by context; the mean differences to dense are -0.02 for the candidate and -0.5 for baselines
DENSE = (1.0, 0.9, 1.0, 0.9, 1.0, 0.9, 1.0, 0.9)
GOOD = (0.98, 0.9, 0.98, 0.86, 0.98, 0.9, 0.98, 0.86)
POOR = (0.5, 0.4, 0.5, 0.4, 0.6, 0.3, 0.5, 0.4)
TOP1: Mapping[str, Sequence[float]] = {
    "dense": DENSE,
    "dense'": DENSE,
    "hindsight keep=0.25": DENSE,
    "fp8": (1.0, 0.88, 1.0, 0.88, 1.0, 0.88, 1.0, 0.88),
    CAND: GOOD,
}
FREED = {"dense": 0.0, "dense'": 0.0, "fp8": 64.0}
"""Blocks of 128 freed by compaction; 96 unless named here."""


def gate(text: str = GATE, **changes: str) -> Gate:
    """The gate, with pieces of its text replaced."""
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    return parse_gate(tomllib.loads(text), "hand.toml")


def freed(blocks: float) -> dict[str, float]:
    return dict(zip(RECLAIM_MODES, (0.0, 0.0, 0.0, 0.0, blocks), strict=True))


def rows(
    workload: str,
    top1: Mapping[str, Sequence[float]],
    blocks: Mapping[str, float],
    arms: Sequence[str],
    changes: Mapping[str, dict[str, Any]],
) -> list[BranchResult]:
    found = []
    for label in arms:
        for context, value in enumerate(top1.get(label, POOR)):
            some = {"workload": workload, "top1": value, "blocks_freed": freed(blocks.get(label, 96.0))}
            found.append(row(label, f"{workload}-{context}", **{**some, **changes.get(label, {})}))
    return found


def evidence(
    workload: str = "copy",
    *,
    top1: Mapping[str, Sequence[float]] | None = None,
    blocks: Mapping[str, float] | None = None,
    arms: Sequence[str] = tuple(ARMS),
    changes: Mapping[str, dict[str, Any]] | None = None,
    passed: bool = True,
    query_aware: bool = False,
    model: str = "tiny",
    findings: Sequence[Finding] = (),
    latency: Sequence[LatencyResult] = (),
    cost: Sequence[CostResult] = (),
) -> SetEvidence:
    made = rows(workload, {**TOP1, **(top1 or {})}, {**FREED, **(blocks or {})}, arms, changes or {})
    cells = aggregate(made).cells
    found = SetResult(
        model=model,
        label=f"{workload} 2k",
        workload=workload,
        length=2048,
        contexts=CONTEXTS,
        questions=1,
        query_aware=query_aware,
        cells=cells,
        floor={"min_top1": 0.5, "max_nll": 1.8, "passed": passed},
        findings=tuple(findings),
    )
    return SetEvidence(found, made, latency, cost)


def everywhere(**options: Any) -> list[SetEvidence]:
    """The four promoting workloads, alike."""
    return [evidence(workload, **options) for workload in WORKLOADS]


def with_arm(info: ArmInfo) -> dict[str, ArmInfo]:
    return {**ARMS, info.label: info}


def relabelled(label: str, **changes: Any) -> ArmInfo:
    policy, _, budget = label.partition(" ")
    return replace(ARMS[CAND], label=label, policy=policy, budget=budget or None, **changes)


def latency(arm: str = CAND, **changes: Any) -> LatencyResult:
    """Dense takes 10 ms; the arm 4 ms (3.9 to 4.2) and 1 ms of its own."""
    values: dict[str, Any] = {
        "model": "tiny",
        "trace_set": "copy 2k",
        "arm": arm,
        "context_tokens": 2048,
        "rounds": 7,
        "attention_seconds": 0.004,
        "attention_low": 0.0039,
        "attention_high": 0.0042,
        "policy_seconds": 0.001,
        "dense_seconds": 0.010,
        "read_bytes": 1e6,
        "flops": 1e6,
        "gigabytes_per_second": 0.25,
        "bandwidth_fraction": 0.1,
        "matrix_fraction": 0.1,
        "hardware": "Some CPU, 2 threads",
    }
    return LatencyResult(**{**values, **changes})


def cost(arm: str = CAND, **changes: Any) -> CostResult:
    values: dict[str, Any] = {
        "model": "tiny",
        "trace_set": "copy 2k",
        "arm": arm,
        "hardware": "h200",
        "batch": 1,
        "context_tokens": 2048,
        "seconds_per_token": 0.001,
        "dense_seconds_per_token": 0.002,
        "calibration_error": None,
    }
    return CostResult(**{**values, **changes})
