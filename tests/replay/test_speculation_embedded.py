"""Acceptance on a real model: prompt lookup pays where text repeats, and a larger cache drafts better."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvassay.measure.acceptance import COMPRESSED, NGRAM, AcceptanceResult, Counters, pooled
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.registry import make
from kvassay.record.fetch import fetch
from kvassay.record.load import load
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.replay.arms import Arm
from kvassay.replay.drafting import Speculation
from kvassay.replay.protocol import Protocol
from kvassay.replay.speculation import replay_speculation
from kvassay.workload.registry import build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BUDGETS = (0.1, 0.5)
ARMS = [
    Arm(make("dense")),
    *(Arm(make("snapkv"), Budget("keep_tokens", keep), Protection()) for keep in BUDGETS),
]
WORKLOADS: dict[str, dict[str, Any]] = {"copy": {"given": 6, "copied": 12}, "prose": {"continued": 24}}
HOW = Speculation(k=8, tokens=10)


def measured(folder: Path, workload: str) -> list[AcceptanceResult]:
    """Rows of one context of 1,024 tokens with two questions."""
    fetch("smollm2-135m")
    model = load("smollm2-135m")
    text = build(workload, model.tokenizer, 1024, questions=2, **WORKLOADS[workload])
    trace = record_sample(model, text, folder / workload, RecordOptions(q_tail=64))
    return replay_speculation(model, trace, ARMS, Protocol(), HOW, {COMPRESSED: None, NGRAM: None})


def figures(rows: Sequence[AcceptanceResult], arm: str, drafter: str, mode: str = "teacher_forced") -> Counters:
    """All questions of one arm at k = 8."""
    found = [r for r in rows if (r.arm, r.drafter, r.mode, r.k) == (arm, drafter, mode, HOW.k)]
    assert len(found) == 2
    return pooled(found)


def test_prompt_lookup_and_compressed_drafts(tmp_path: Path) -> None:
    rows = {workload: measured(tmp_path, workload) for workload in WORKLOADS}
    copy, prose = (figures(rows[name], "dense", NGRAM) for name in ("copy", "prose"))
    assert copy.rounds == prose.rounds == 2 * HOW.tokens
    assert copy.num_accepted_tokens > 3 * copy.rounds and prose.num_accepted_tokens < prose.rounds
    labels = [arm.label for arm in (*ARMS[1:], ARMS[0])]
    for found in rows.values():
        drafts = [figures(found, label, COMPRESSED) for label in labels]
        expected = [one.expected_acceptance or 0.0 for one in drafts]
        assert expected == sorted(set(expected)) and expected[-1] > 0.999
        assert drafts[-1].acceptance_rate == 1
    # Prose needs little of its context; the list to be copied is lost at either budget, its question unseen.
    lengths = [figures(rows["prose"], label, COMPRESSED).accepted_length or 0.0 for label in labels]
    assert lengths == sorted(set(lengths))
    lost = figures(rows["copy"], labels[1], NGRAM)
    assert lost.num_accepted_tokens < copy.num_accepted_tokens / 2
