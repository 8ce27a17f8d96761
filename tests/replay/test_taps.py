"""Recorded taps and sinks as policies see them, and traces that are their own reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvassay.errors import EvidenceMissing
from kvassay.layout.config import from_config
from kvassay.policy.base import Memory, Policy
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.card import Card, Effect, Evidence
from kvassay.policy.registry import make
from kvassay.policy.views import LayerView, Rows
from kvassay.record.load import LoadedModel, ModelIdentity
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.replay.arms import Arm
from kvassay.replay.closed import replay_trace
from kvassay.replay.open import open_loop, output_errors
from kvassay.replay.protocol import Protocol
from kvassay.trace.reader import Trace
from tests.record import tiny
from tests.replay import synthetic
from tests.replay.worlds import Words

CONTEXT = 150
PROTECTION = Protection(4, 16)
DENSE = Arm(make("dense"), None, PROTECTION)
TAPS = ("lse", "bucket", "hidden", "layer_input", "output")
SHOWN: dict[tuple[str, int], Any] = {}


def card(name: str, *evidence: Evidence) -> Card:
    return Card(name, frozenset({Effect.EVICT}), "test", "test", evidence=frozenset(evidence))


@dataclass(frozen=True)
class Local(Policy):
    """Score = the attention a token gets from the queries of its own bucket; notes what it was shown."""

    card: ClassVar[Card] = card(
        "local", Evidence.ROW_LSE, Evidence.BUCKET, Evidence.HIDDEN, Evidence.LAYER_INPUT, Evidence.QUERIES
    )

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        lse, bucket = layer.row_lse(), layer.bucket_scores()
        SHOWN["lse", layer.index], SHOWN["bucket", layer.index] = lse, bucket
        SHOWN["hidden", layer.index], SHOWN["input", layer.index] = layer.hidden(), layer.layer_input()
        SHOWN["touched", layer.index] = dict(layer._meter.touched)
        attention = (bucket.values - lse.values[..., None]).exp()
        size = attention.shape[-1]
        base = bucket.positions // size * size
        at = (base[:, None] + torch.arange(size)).clamp(max=layer.length - 1)
        total = torch.zeros(layer.layer.q_heads, layer.length)
        for head, row in enumerate(total):
            row.index_add_(0, at.flatten(), attention[:, head].flatten())
        return layer.group_sum(total)[:, layer.positions[0]]


@dataclass(frozen=True)
class Undeclared(Policy):
    card: ClassVar[Card] = card("undeclared", Evidence.KEYS)

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        return layer.row_lse().values


@dataclass(frozen=True)
class Looker(Policy):
    """Notes the attention rows of the last four queries."""

    card: ClassVar[Card] = card("looker", Evidence.QUERIES, Evidence.ATTENTION)

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        SHOWN["rows", layer.index] = layer.attention(4)
        return torch.zeros(layer.alive.shape)


def world(family: str, folder: Path, **options: Any) -> tuple[LoadedModel, Trace]:
    model = tiny.build(family)
    loaded = LoadedModel(model, None, from_config(model.config), ModelIdentity("m", "folder", "0" * 64, "1" * 64))
    chosen = RecordOptions(**{"prefill_chunk": 40, "q_tail": 64, "logits": "full", **options})
    trace = record_sample(loaded, synthetic.sample(CONTEXT, 5), folder / "t", chosen)
    return LoadedModel(model, Words(), loaded.layout, loaded.identity), trace


def arm(policy: Policy, keep: float = 0.5) -> Arm:
    return Arm(policy, Budget("keep_tokens", keep), PROTECTION)


def test_taps_reach_a_policy_in_both_loops(tmp_path: Path) -> None:
    loaded, trace = world("llama", tmp_path, taps=TAPS, bucket=20)
    for replay in (
        lambda: open_loop(trace, [arm(Local())]),
        lambda: replay_trace(loaded, trace, [DENSE, arm(Local())], Protocol(free_tokens=0)),
    ):
        SHOWN.clear()
        assert replay()
        for layer in range(4):
            for name, kind in (("hidden", "hidden"), ("input", "layer_input"), ("lse", "lse"), ("bucket", "bucket")):
                shown: Rows = SHOWN[name, layer]
                assert torch.equal(shown.values, trace.prefix.tap(f"{kind}_{layer:03d}"))
                assert shown.positions.tolist() == list(range(CONTEXT))
            # 4 heads of float32 lse, 4 x 20 of scores; streams at 2 bytes an element; each charged once
            touched = {name: count / (layer + 1) for name, count in SHOWN["touched", layer].items()}
            assert touched["row_lse"] == CONTEXT * 4 * 4
            assert touched["bucket"] == CONTEXT * 4 * 20 * 4
            assert touched["hidden"] == touched["layer_input"] == CONTEXT * 64 * trace.layout.element_bytes


def test_bucket_scores_and_lse_are_true_attention(tmp_path: Path) -> None:
    _, trace = world("llama", tmp_path, taps=("lse", "bucket"), bucket=20, q_tail=CONTEXT)
    layer, size = trace.layout.layers[2], 20
    q, k = trace.prefix.q(2).double(), trace.prefix.k(2).double()
    lse, bucket = trace.prefix.tap("lse_002").double(), trace.prefix.tap("bucket_002").double()
    for p in range(0, CONTEXT, 7):
        for head in range(4):
            logits = k[: p + 1, head // 2] @ q[p, head] * layer.scale
            own = torch.softmax(logits, 0)[p // size * size :]
            found = (bucket[p, head] - lse[p, head]).exp()
            torch.testing.assert_close(found[: len(own)], own, rtol=1e-4, atol=1e-7)
            assert found[len(own) :].tolist() == [0.0] * (size - len(own))


def test_a_tap_that_was_not_recorded_says_how_to_record_it(tmp_path: Path) -> None:
    loaded, trace = world("llama", tmp_path, taps=("lse",))
    message = "policy 'local' needs bucket of layer 0, .* record with --tap bucket"
    with pytest.raises(EvidenceMissing, match=message):
        open_loop(trace, [arm(Local())])
    with pytest.raises(EvidenceMissing, match=message):
        replay_trace(loaded, trace, [DENSE, arm(Local())], Protocol(free_tokens=0))
    with pytest.raises(EvidenceMissing, match="'undeclared' touched row_lse of layer 0 without declaring it"):
        open_loop(trace, [arm(Undeclared())])


@pytest.mark.parametrize("family", ["gpt_oss", "mimo_v2_flash"])
def test_a_model_with_sinks_is_recorded_and_replayed(family: str, tmp_path: Path) -> None:
    loaded, trace = world(family, tmp_path, taps=("output",))
    with_sinks = [layer.index for layer in trace.layout.layers if layer.sinks]
    assert sorted(trace.header.sinks) == with_sinks
    assert max(e.error for e in output_errors(trace)) < 1e-5
    (row, _) = replay_trace(loaded, trace, [DENSE], Protocol(free_tokens=0))
    branch = trace.branches[0]
    log_p = torch.log_softmax(branch.logits[branch.question_tokens - 1 : -1].double(), -1)
    gold = branch.token_ids[branch.question_tokens :].long()
    assert row.nll == pytest.approx(float(-log_p.gather(1, gold[:, None]).mean()), abs=1e-4)


def test_attention_shown_to_a_policy_leaves_the_sink_its_mass(tmp_path: Path) -> None:
    _, trace = world("gpt_oss", tmp_path)
    SHOWN.clear()
    open_loop(trace, [arm(Looker())])
    for index in (layer.index for layer in trace.layout.layers if layer.kind == "full"):
        rows, layer = SHOWN["rows", index], trace.layout.layers[index]
        q, k = trace.prefix.q(index).double(), trace.prefix.k(index).double()
        for row in range(4):
            p = CONTEXT - 4 + row
            for head in range(4):
                logits = k[: p + 1, head // 2] @ q[row - 4, head] * layer.scale
                sink = math.exp(trace.header.sinks[index][head])
                expected = logits.exp() / (logits.exp().sum() + sink)
                torch.testing.assert_close(rows[head, row, : p + 1].double(), expected, rtol=1e-4, atol=1e-6)
                assert float(rows[head, row].sum()) < 1


def test_a_float16_trace_is_its_own_reference(tmp_path: Path) -> None:
    loaded, half = world("llama", tmp_path, dtype="float16", taps=("output",))
    (tmp_path / "exact").mkdir()
    _, exact = world("llama", tmp_path / "exact")
    assert half.prefix.k(0).dtype is torch.float16
    arms = [DENSE, arm(make("snapkv", window=20))]
    rows, reference = (replay_trace(loaded, t, arms, Protocol(free_tokens=0)) for t in (half, exact))
    for row, other in zip(rows, reference, strict=True):
        assert row.nll != other.nll
        assert row.nll == pytest.approx(other.nll, abs=0.05)
        assert row.arm != "dense" or (row.kl, row.agree) == (0.0, 1.0)
    found = {row.layer: row for row in open_loop(half, arms) if row.branch == 0 and row.arm == "dense"}
    assert all((row.output_error, row.retained_mass) == (0.0, 1.0) for row in found.values())
    worst = max(e.error for e in output_errors(half))
    assert 1e-5 < worst < 5e-3  # rows rounded to 11 bits, not the model's own
