"""A small real trace, checked in: SmolLM2-135M-Instruct on 32 tokens and one question, as float16.

A version that cannot read it any more breaks the traces of its users. Its numbers are of a real model, so what real
attention looks like can be tested without one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvassay.measure.result import LayerFidelity
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.registry import make
from kvassay.replay.arms import Arm
from kvassay.replay.open import open_loop
from kvassay.replay.protocol import Protocol
from kvassay.trace.reader import Trace
from kvassay.trace.verify import verify

PATH = Path(__file__).parents[1] / "data" / "smollm2-prose-32"
SINK, RECENT, KEEP = 2, 6, 16
CONTEXT, BRANCH, HEADS, GROUP, DIM = 32, 10, 9, 3, 64


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace.open(PATH)


def test_it_opens_and_every_byte_is_as_recorded(trace: Trace) -> None:
    assert verify(PATH).ok
    assert (trace.prefix.tokens, trace.branches[0].tokens) == (CONTEXT, BRANCH)
    assert trace.branches[0].answer_text == " a ustar header block."
    assert trace.header.model.name == "smollm2-135m"


def weights(trace: Trace, layer: int) -> np.ndarray:
    """Causal attention of the branch's queries in float64: [q_heads, queries, tokens]."""
    k = np.concatenate([s.k(layer).double().numpy() for s in (trace.prefix, trace.branches[0])])
    q = trace.branches[0].q(layer).double().numpy()
    logits = np.stack([q[:, h] @ k[:, h // GROUP].T for h in range(HEADS)]) / np.sqrt(DIM)
    later = np.arange(CONTEXT + BRANCH)[None] > CONTEXT + np.arange(BRANCH)[:, None]
    logits[:, later] = -np.inf
    found = np.exp(logits - logits.max(-1, keepdims=True))
    return found / found.sum(-1, keepdims=True)


def test_a_real_model_parks_its_attention_on_the_first_token(trace: Trace) -> None:
    on_first = np.mean([weights(trace, layer)[..., 0].mean() for layer in range(3, 30)])
    assert on_first > 0.4  # an even share would be 1 / 38


def arm(name: str) -> Arm:
    return Arm(make(name), Budget("keep_tokens", KEEP), Protection(SINK, RECENT))


def replayed(trace: Trace, *arms: Arm) -> dict[tuple[str, int], LayerFidelity]:
    return {(row.arm, row.layer): row for row in open_loop(trace, arms, Protocol())}


def test_the_open_loop_reads_off_what_float64_does(trace: Trace) -> None:
    recency = arm("recency")
    rows = replayed(trace, recency)
    kept = np.r_[0:SINK, CONTEXT - (KEEP - SINK) : CONTEXT + BRANCH]
    for layer in (0, 11, 29):
        mass = weights(trace, layer)[..., kept].sum(-1).mean()
        assert rows[recency.label, layer].retained_mass == pytest.approx(mass, abs=1e-4)


def test_a_window_without_its_sink_is_worse_on_a_real_model(trace: Trace) -> None:
    """What StreamingLLM found (arXiv 2309.17453): the first tokens' values hardly matter, their share does."""
    with_sink = arm("recency")
    without = Arm(make("recency"), Budget("keep_tokens", KEEP), Protection(0, RECENT))
    ours, theirs = (np.mean([r.output_error for r in replayed(trace, a).values()]) for a in (with_sink, without))
    assert ours < 0.6 * theirs
