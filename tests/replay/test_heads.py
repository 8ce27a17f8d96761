"""A layer head by head against the open loop over the whole layer, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvassay.cache.edits import Decision, Evict, Merge
from kvassay.errors import PolicyError
from kvassay.layout.model import KV, Component, Layer, Layout
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.registry import make
from kvassay.policy.views import Meter
from kvassay.replay.arms import Arm
from kvassay.replay.heads import replay_heads
from kvassay.replay.limits import refusal
from kvassay.replay.onehead import of_head
from kvassay.replay.open import open_loop
from kvassay.replay.protocol import Protocol
from kvassay.replay.traced import TracedLayer
from kvassay.replay.whole import AllHeads
from kvassay.trace.reader import Trace
from tests.replay import synthetic

SINK, RECENT = 4, 16
TOKENS, QUESTION = 320, 6
SELECTORS = {"quest": {"dense_layers": 0}, "m3-exact-mass": {"dense_layers": 0, "block": 32}}


def arm(name: str, amount: float = 0.5, **parameters: object) -> Arm:
    policy = make(name, **(parameters or SELECTORS.get(name, {})))
    units = [unit for unit in ("keep_tokens", "read_tokens") if unit in policy.card.budgets]
    return Arm(policy, Budget(units[0], amount) if units else None, Protection(SINK, RECENT))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("heads") / "t"
    return synthetic.make(
        path, tokens=TOKENS, branches=(QUESTION,), q_heads=6, kv_heads=3, dim=32, windows=(None,), q_tail=TOKENS
    )


@pytest.mark.parametrize(
    "name",
    [
        *("dense", "random", "recency", "streaming", "snapkv", "tova", "keydiff", "knorm", "adakv-snapkv", "h2o"),
        *("expected-attention", "quest", "locks", "centroid", "m3-exact-mass", "exact_mass", "hindsight"),
        *("nearest-merge", "think"),
    ],
)
def test_head_by_head_is_what_the_open_loop_finds_in_the_whole_layer(trace: Trace, name: str) -> None:
    wanted = arm(name)
    (whole,) = open_loop(trace, [wanted])
    (found,) = replay_heads(TracedLayer(trace, 0, trace.branches[0]), trace.layout, [wanted], Protocol())
    deviation = found.deviation
    assert deviation.output_error == pytest.approx(whole.output_error, rel=1e-4, abs=1e-6)
    assert deviation.retained_mass == pytest.approx(whole.retained_mass, rel=1e-5)
    assert deviation.head_errors == pytest.approx(whole.head_errors, rel=1e-4, abs=1e-6)
    assert (deviation.read + deviation.scanned) / QUESTION == pytest.approx(whole.read_bytes, rel=1e-6)
    assert deviation.scanned / QUESTION == pytest.approx(whole.scan_bytes, rel=1e-6)
    assert deviation.dense / QUESTION == pytest.approx(whole.dense_bytes, rel=1e-6)


def test_arms_replayed_together_are_what_they_are_alone(trace: Trace) -> None:
    source = TracedLayer(trace, 0, trace.branches[0])
    arms = [arm("knorm", 0.25), arm("random", 0.5), arm("knorm"), arm("tova"), arm("quest"), arm("paged-eviction")]
    together = replay_heads(source, trace.layout, arms, Protocol())
    for one, found in zip(arms, together, strict=True):
        (alone,) = replay_heads(source, trace.layout, [one], Protocol())
        assert found.deviation == alone.deviation
        assert (found.held, found.dense) == (alone.held, alone.dense)
        assert found.touched == pytest.approx(alone.touched)


def test_bytes_and_blocks_of_one_layer(trace: Trace) -> None:
    arms = [arm("dense"), arm("recency"), arm("fp8"), arm("paged-eviction", 0.25), arm("knorm")]
    source = TracedLayer(trace, 0, trace.branches[0])
    dense, recency, fp8, paged, knorm = replay_heads(source, trace.layout, arms, Protocol())
    layer, element = trace.layout.layers[0], trace.layout.element_bytes
    whole = TOKENS * 3 * 64 * element
    assert [x.held for x in (dense, recency, fp8, paged)] == [whole, whole / 2, whole / 2, whole / 4]
    assert all(x.dense == whole for x in (dense, recency, fp8, paged))
    # 20 blocks; recency keeps 4 sinks in the first and 156 others, the last 10 blocks but for 4 tokens.
    assert recency.freed(layer, 16, element) == {"per_layer_tables": 9, "per_head_tables": 9}
    assert fp8.freed(layer, 16, element) == {"per_layer_tables": 10, "per_head_tables": 10}
    assert paged.freed(layer, 16, element) == {"per_layer_tables": 15, "per_head_tables": 15}
    # The question's own tokens are codes, too: half of what dense reads, to the byte.
    assert fp8.deviation.read == dense.deviation.read / 2
    masks = torch.stack([torch.from_numpy(mask) for mask in knorm.keep]).view(3, 20, 16).any(2)
    assert knorm.freed(layer, 16, element) == pytest.approx(
        {"per_layer_tables": int((~masks.any(0)).sum()), "per_head_tables": float((~masks).sum() / 3)}
    )


class Planted:
    """Random rows in which query head 1 looks for given tokens."""

    def __init__(self, targets: Mapping[int, int]) -> None:
        self.layer = Layer(0, 2, (Component(KV(1, 8, 8)),), 0.3)
        self.context, self.question, self.natural, self._targets = 100, 4, 2, targets

    def keys(self, head: int, first: int, count: int) -> Tensor:
        return self._rows(1)[first : first + count]

    def values(self, head: int, first: int, count: int) -> Tensor:
        return self._rows(2)[first : first + count]

    def queries(self, head: int, first: int, count: int) -> Tensor:
        return self._rows(3 + head)[first : first + count]

    def aimed(self, head: int, first: int, count: int) -> Mapping[int, int]:
        return {at: target for at, target in self._targets.items() if head == 1 and first <= at < first + count}

    def _rows(self, seed: int) -> Tensor:
        return torch.randn(104, 8, generator=torch.Generator().manual_seed(seed))


def test_recall_is_the_share_of_targets_that_may_be_read() -> None:
    source = Planted({100: 2, 101: 40, 102: 60, 103: 99})
    layout = Layout("random", (source.layer,), 8, 50, 1 << 20)
    recency = Arm(make("recency"), Budget("keep_tokens", 0.5), Protection(4, 16))
    (found, dense) = replay_heads(source, layout, [recency, arm("dense")], Protocol())
    assert (found.found, found.targets) == (3, 4)  # of 4 sinks and the last 46, 40 is lost
    assert (dense.found, dense.targets) == (4, 4)


def test_a_whole_layers_decision_is_dealt_out_to_its_heads() -> None:
    keep = torch.tensor([[True, False], [False, True]])
    dealt = of_head(Decision({0: [Evict(keep)], 1: [Evict(keep[1])]}, compact=True), 1)
    assert dealt.compact
    assert [edit.keep.tolist() for edits in dealt.edits.values() for edit in edits if isinstance(edit, Evict)] == [
        [[False, True]],
        [False, True],
    ]
    merge = Merge(torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2))
    with pytest.raises(PolicyError, match="Merge for all KV heads together cannot be dealt out"):
        of_head(Decision({0: [merge]}), 0)


def test_all_heads_show_attention_but_never_their_keys_together(trace: Trace) -> None:
    source = TracedLayer(trace, 0, trace.branches[0])
    view = AllHeads(source, make("tova").card, Protection(0, 0), Meter(2.0), window=4)
    rows = view.attention(2)
    keys = trace.prefix.k(0).transpose(0, 1).repeat_interleave(2, 0)
    logits = trace.prefix.q(0)[-2:].transpose(0, 1) @ keys.transpose(1, 2) * 0.5
    logits[:, 0, -1] = -torch.inf
    assert torch.allclose(rows, torch.softmax(logits, -1), atol=1e-6)
    with pytest.raises(PolicyError, match="looks at the keys of all 3 KV heads of layer 0 at once"):
        _ = view.keys


LARGE = Layer(3, 32, (Component(KV(8, 128, 128)),), 0.1)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "h2o",
            "needs every prompt query (16.0 GiB in float32) and compares tokens with each other (about 2.3e+15 mult",
        ),
        ("nearest-merge", "compares tokens with each other (about 5.6e+14 multiply-adds), per layer at 1048576"),
        ("pyramidkv", "shares one budget out over the layers; one layer is replayed at a time"),
        ("svd", "learns offline from a model's text"),
        ("selkv", "needs bucket, lse of every token, which only a model gives"),
    ],
)
def test_what_a_long_context_has_no_room_for_is_refused_with_the_estimate(name: str, reason: str) -> None:
    assert (refusal(arm(name), LARGE, 1 << 20, 8) or "").startswith(reason)


def test_quadratic_methods_are_refused_only_above_their_length() -> None:
    assert refusal(arm("h2o"), LARGE, 65_536, 8) is None
    assert refusal(arm("nearest-merge"), LARGE, 65_536, 8) is None
    assert refusal(arm("nearest-merge"), LARGE, 65_537, 8) is not None


def test_a_policy_that_does_not_say_its_heads_are_apart_is_refused_with_the_memory() -> None:
    rdkv = Arm(make("rdkv"), Budget("bytes", 0.25), Protection(0, 0))
    reason = refusal(rdkv, LARGE, 1 << 20, 8) or ""
    assert "one KV head at a time; all heads of a layer take 8.0 GiB in float32 at 1048576 tokens" in reason


def test_policies_of_window_or_step_evidence_take_a_million_tokens() -> None:
    names = "dense random recency streaming snapkv tova keydiff knorm adakv-snapkv paged-eviction quest locks centroid"
    for name in [*names.split(), "exact_mass", "hindsight", "fp8", "int8", "kivi", "think", "m3-exact-mass"]:
        assert refusal(arm(name, dense_layers=0) if name == "quest" else arm(name), LARGE, 1 << 20, 8) is None, name


def test_queries_before_the_first_recorded_one_are_missing(tmp_path: Path) -> None:
    trace = synthetic.make(tmp_path / "t", tokens=64, q_tail=8)
    with pytest.raises(Exception, match="queries of prefix are stored from position 56 on, 50 was"):
        TracedLayer(trace, 0, trace.branches[0]).queries(0, 50, 4)
