"""The open loop against plain float64 attention, against the closed loop, and against what the model did."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvassay.cache.edits import Decision, Quantize
from kvassay.errors import ExperimentError, PolicyError
from kvassay.layout.config import from_config
from kvassay.measure.fidelity import screen
from kvassay.measure.result import LayerFidelity
from kvassay.policy.base import Memory, Policy
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.card import Approximates, Card, Effect, Evidence, Prefill, When
from kvassay.policy.readset import ReadSet
from kvassay.policy.registry import make, names
from kvassay.policy.views import CacheView, LayerView
from kvassay.record.fetch import fetch
from kvassay.record.load import LoadedModel, ModelIdentity, load
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.replay.arms import Arm, grid
from kvassay.replay.closed import Replay
from kvassay.replay.open import covers, open_loop, output_errors
from kvassay.replay.protocol import Protocol
from kvassay.trace.reader import Trace
from kvassay.workload.registry import build
from tests.record import tiny
from tests.replay import plain, synthetic
from tests.replay.worlds import World

WORLDS = pytest.mark.parametrize("world", ["llama", "gemma"], indirect=True)
SINK, RECENT = 4, 16
PROTECTION = Protection(SINK, RECENT)
DENSE = Arm(make("dense"), None, PROTECTION)


def arm(name: str | Policy, keep: float = 0.5, **parameters: object) -> Arm:
    policy = make(name, **parameters) if isinstance(name, str) else name
    unit = "keep_tokens" if "keep_tokens" in policy.card.budgets else "read_tokens"
    return Arm(policy, Budget(unit, keep) if policy.card.budgets else None, PROTECTION)


def by_key(rows: list[LayerFidelity]) -> dict[tuple[str, int, int], LayerFidelity]:
    return {(row.arm, row.branch, row.layer): row for row in rows}


def full_layers(trace: Trace) -> list[int]:
    return [layer.index for layer in trace.layout.layers if layer.kind == "full"]


@dataclass(frozen=True)
class Fp8Once(Policy):
    """Encodes the context once; what comes after stays as it is."""

    card: ClassVar[Card] = Card(
        name="fp8-once",
        effects=frozenset({Effect.QUANTIZE}),
        source="test",
        summary="test",
        approximates=frozenset({Approximates.KEYS, Approximates.VALUES}),
        budgets=frozenset(),
    )

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        return Decision({index: [Quantize(8, 8, number="fp8_e4m3")] for index in cache.layers})


# -- dense is the model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gemma4", "gpt_oss", "mimo_v2_flash"])
def test_dense_reproduces_every_layers_recorded_attention_output(family: str, tmp_path: Path) -> None:
    model = tiny.build(family)
    loaded = LoadedModel(model, None, from_config(model.config), ModelIdentity("m", "folder", "0" * 64, "1" * 64))
    options = RecordOptions(prefill_chunk=40, q_tail=30, taps=("output",))
    trace = record_sample(loaded, synthetic.sample(90, 4), tmp_path / "t", options)
    found = output_errors(trace)
    layers = range(len(trace.layout.layers))
    assert [(e.segment, e.layer) for e in found] == [
        (name, layer) for name in ("branch_000", "branch_001", "prefix") for layer in layers
    ]
    assert max(e.error for e in found) < 1e-5
    trace.prefix.v(1)[88] += 1.0  # mapped copy on write: the file keeps its value
    changed = {e.layer for e in output_errors(trace) if e.error > 1e-5}
    assert changed == {layer.index for layer in trace.layout.layers if 1 in (layer.index, layer.cache_of)}


@WORLDS
def test_dense_has_no_error_and_all_the_mass(world: World) -> None:
    for row in open_loop(world.trace, [DENSE]):
        assert (row.output_error, row.retained_mass) == (0.0, 1.0)


def test_dense_token_by_token_differs_by_rounding_alone(llama: World) -> None:
    for row in open_loop(llama.trace, [Arm(make("dense"), None, PROTECTION, again=True)]):
        assert row.output_error < 1e-6
        assert row.retained_mass == pytest.approx(1, abs=1e-6)


# -- against float64 by hand -----------------------------------------------------------------------------


@WORLDS
def test_eviction_is_what_plain_attention_over_the_kept_tokens_gives(world: World) -> None:
    trace, context = world.trace, world.trace.prefix.tokens
    found = by_key(open_loop(trace, [arm("knorm")]))
    for layer in full_layers(trace):
        group = trace.layout.layers[layer].group_size
        norms = -trace.prefix.k(layer).double().norm(dim=-1).T
        keep = plain.top(norms, context // 2, SINK, RECENT, context).repeat_interleave(group, 0)
        for number, branch in enumerate(trace.branches):
            expected = plain.fidelity(trace, branch, layer, keep.expand(branch.tokens, -1, -1))
            row = found["knorm keep=0.5", number, layer]
            assert (row.output_error, row.retained_mass) == pytest.approx(expected, rel=1e-4)
            assert row.output_error > 0.05


@WORLDS
def test_bytes_read_are_those_of_the_kept_tokens_and_the_branchs_own(world: World) -> None:
    trace, context = world.trace, world.trace.prefix.tokens
    found = by_key(open_loop(trace, [arm("knorm")]))
    for layer in full_layers(trace):
        kv = trace.layout.source(layer).kv
        token = kv.kv_heads * (kv.k_dim + kv.v_dim) * trace.layout.element_bytes
        for number, branch in enumerate(trace.branches):
            row, own = found["knorm keep=0.5", number, layer], (branch.tokens + 1) / 2
            assert row.dense_bytes == pytest.approx(token * (context + own))
            assert (row.read_bytes, row.scan_bytes) == pytest.approx((token * (context // 2 + own), 0))


def test_a_selectors_scan_is_part_of_what_it_reads(llama: World) -> None:
    trace, budget = llama.trace, 96
    (first, *_), *_ = [open_loop(trace, [Arm(make("locks"), Budget("read_tokens", budget), Protection(0, 0))])]
    kv, context, branch = trace.layout.layers[0].kv, trace.prefix.tokens, trace.branches[0]
    block = kv.kv_heads * (8 * kv.k_dim // 2 + kv.k_dim + 16 * 8 + 2 * (8 + 16 + 1))
    described = [(context + t) // 16 for t in range(branch.tokens)]
    # The newest block is rarely full: of the budget's six, five are, and page 0 may be among them.
    newest = [(context + t) % 16 + 1 for t in range(branch.tokens)]
    token = kv.kv_heads * (kv.k_dim + kv.v_dim) * trace.layout.element_bytes
    assert first.scan_bytes == pytest.approx(block * sum(described) / branch.tokens)
    assert first.read_bytes - first.scan_bytes == pytest.approx(token * (80 + sum(newest) / branch.tokens))


@WORLDS
def test_selection_is_made_query_by_query(world: World) -> None:
    trace, budget = world.trace, world.trace.prefix.tokens // 2
    found = by_key(open_loop(trace, [arm("exact_mass")]))
    for layer in full_layers(trace):
        for number, branch in enumerate(trace.branches):
            keys = plain.rows(trace, branch, layer, "k")
            dense, group = plain.weights(trace, branch, layer, keys), trace.layout.layers[layer].group_size
            read = torch.ones_like(dense, dtype=torch.bool)
            for t in range(branch.tokens):
                length = branch.start + t + 1
                mass = dense[t, :, :length].unflatten(0, (-1, group)).sum(1)
                read[t, :, :length] = plain.top(mass, budget, SINK, RECENT, length).repeat_interleave(group, 0)
            expected = _selected(trace, branch, layer, read, dense)
            row = found["exact_mass read=0.5", number, layer]
            assert (row.output_error, row.retained_mass) == pytest.approx(expected, rel=1e-4)


def _selected(trace: Trace, branch: Any, layer: int, read: Tensor, dense: Tensor) -> tuple[float, float]:
    """As `plain.fidelity`, for a selection that may leave out tokens of the branch too."""
    v = plain.rows(trace, branch, layer, "v").repeat_interleave(trace.layout.layers[layer].group_size, 1)
    arm_weights = dense * read
    arm_weights = arm_weights / arm_weights.sum(-1, keepdim=True)
    out, reference = (torch.einsum("qhj,jhd->qhd", w, v) for w in (arm_weights, dense))
    return float((out - reference).norm() / reference.norm()), float((dense * read).sum(-1).mean())


@WORLDS
def test_encoded_context_is_read_decoded(world: World) -> None:
    trace = world.trace
    found = by_key(open_loop(trace, [arm(Fp8Once())]))
    for layer in full_layers(trace):
        sides = [side(layer).to(torch.float8_e4m3fn).double() for side in (trace.prefix.k, trace.prefix.v)]
        for number, branch in enumerate(trace.branches):
            error, mass = plain.fidelity(trace, branch, layer, changed=(sides[0], sides[1]))
            row = found["fp8-once", number, layer]
            assert row.output_error == pytest.approx(error, rel=1e-3)
            assert 1e-3 < row.output_error < 0.2
            assert (row.retained_mass, mass) == (1.0, 1.0)


def test_a_policy_that_learns_offline_is_fitted_on_the_calibration(llama: World) -> None:
    trace, one = llama.trace, arm("svd", rank=0.5, domain="post_rope")
    found = by_key(open_loop(trace, [one], calibration=llama.calibration))
    for layer in range(4):
        changed = []
        for name in ("k", "v"):
            learnt = llama.calibration.prefix.cache(layer, name).double().flatten(1)
            basis = torch.linalg.svd(learnt, full_matrices=False).Vh[: learnt.shape[1] // 2]
            own = trace.prefix.cache(layer, name).double()
            changed.append((own.flatten(1) @ basis.T @ basis).view_as(own))
        for number, branch in enumerate(trace.branches):
            expected = plain.fidelity(trace, branch, layer, changed=(changed[0], changed[1]))
            row = found[one.label, number, layer]
            assert (row.output_error, row.retained_mass) == pytest.approx(expected, rel=1e-3)
            assert row.output_error > 0.01


def test_layers_outside_the_scope_are_dense_and_said_to_be(gemma: World) -> None:
    trace = gemma.trace
    rows = open_loop(trace, [arm("random"), arm("quest", dense_layers=0, block=16, keep=0.8)], Protocol(block_size=8))
    sliding = [row for row in rows if row.layer not in full_layers(trace)]
    assert len(sliding) == 2 * len(trace.branches) * 4
    assert all(not row.in_scope and row.output_error < 1e-6 and row.retained_mass > 1 - 1e-6 for row in sliding)
    assert all(row.in_scope and row.output_error > 1e-3 for row in rows if row not in sliding)


# -- controls and references -----------------------------------------------------------------------------


@WORLDS
@pytest.mark.parametrize("keep", [0.3, 0.7])
def test_random_keeps_its_share_of_the_mass(world: World, keep: float) -> None:
    trace, context = world.trace, world.trace.prefix.tokens
    share = (int(keep * context) - SINK - RECENT) / (context - SINK - RECENT)
    rows = [row for row in open_loop(trace, [arm("random", keep)]) if row.in_scope]
    expected = []
    for row in rows:
        branch = trace.branches[row.branch]
        dense = plain.weights(trace, branch, row.layer, plain.rows(trace, branch, row.layer, "k"))
        free = dense[..., SINK : context - RECENT].sum(-1).mean()
        expected.append(float(1 - free + free * share))
    mean = sum(row.retained_mass for row in rows) / len(rows)
    assert mean == pytest.approx(sum(expected) / len(rows), abs=0.04)


@given(seed=st.integers(0, 2**16), keep=st.integers(22, 39), tokens=st.integers(40, 60))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_scorer_retains_more_of_the_future_it_saw_than_hindsight(
    seed: int, keep: int, tokens: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # With one query head per KV head and one future query, the top k of its mass is the most that k tokens hold.
    trace = synthetic.make(tmp_path_factory.mktemp("t") / "t", tokens=tokens, seed=seed)
    rivals = ["random", "recency", "streaming", "keydiff", "knorm", "tova"]
    arms = [Arm(make(name), Budget("keep_tokens", keep), PROTECTION) for name in ["hindsight", *rivals]]
    found = by_key(open_loop(trace, arms))
    for layer in (0, 1):
        best = found[f"hindsight keep={keep}", 0, layer].retained_mass
        for name in rivals:
            assert found[f"{name} keep={keep}", 0, layer].retained_mass <= best + 1e-6


@WORLDS
def test_hindsight_is_ahead_on_average(world: World) -> None:
    policies = [make(n) for n in ("hindsight", "random", "recency", "snapkv", "keydiff", "knorm", "tova")]
    lines = screen(open_loop(world.trace, grid([make("dense"), *policies], [Budget("keep_tokens", 0.5)], PROTECTION)))
    mass = {line.arm: line.retained_mass for line in lines}
    assert max(mass, key=lambda x: mass[x]) == "dense"
    del mass["dense"]
    assert max(mass, key=lambda x: mass[x]) == "hindsight keep=0.5"


# -- the same policies as in the closed loop ---------------------------------------------------------------


@WORLDS
def test_it_keeps_what_the_closed_loop_keeps(world: World) -> None:
    trace, protocol = world.trace, Protocol(free_tokens=0, seed=3)
    arms = [arm(name) for name in ("random", "snapkv", "keydiff", "tova", "hindsight", "snapkv~shuffled")]
    closed = Replay(world.loaded, trace, [DENSE, *arms], protocol)
    found = by_key(open_loop(trace, arms, protocol))
    branch = trace.branches[0]
    for one in arms:
        lane = closed.compressed(one).lane
        for layer in full_layers(trace):
            keep = torch.zeros(trace.layout.layers[layer].kv.kv_heads, trace.prefix.tokens, dtype=torch.bool)
            for head, positions in enumerate(closed.cache.ledger.live(lane.seq, layer)):
                keep[head, torch.from_numpy(positions).long()] = True
            read = keep.repeat_interleave(trace.layout.layers[layer].group_size, 0)
            expected = plain.fidelity(trace, branch, layer, read.expand(branch.tokens, -1, -1))
            row = found[one.label, 0, layer]
            assert (row.output_error, row.retained_mass) == pytest.approx(expected, rel=1e-4), one.label


SEEN: list[tuple[int, int, int, int]] = []


@dataclass(frozen=True)
class Witness(Policy):
    """Reads everything, and notes what it is shown."""

    card: ClassVar[Card] = Card(
        name="witness",
        effects=frozenset({Effect.SELECT}),
        source="test",
        summary="test",
        when=frozenset({When.EVERY_STEP}),
        evidence=frozenset({Evidence.KEYS, Evidence.QUERY}),
        budgets=frozenset(),
    )

    def read(
        self, layer: LayerView, query: Tensor, memory: Memory, budget: Allowance, previous: ReadSet | None
    ) -> ReadSet | None:
        SEEN.append((layer.index, query.shape[1], layer.length, int(layer.positions.max())))
        return None


def test_a_selecting_policy_sees_one_query_and_nothing_later(llama: World) -> None:
    SEEN.clear()
    rows = open_loop(llama.trace, [arm(Witness())])
    assert max(row.output_error for row in rows) < 1e-6
    start = llama.trace.prefix.tokens
    expected = [
        (layer, 1, length, length - 1)
        for layer in range(4)
        for branch in llama.trace.branches
        for length in range(start + 1, start + branch.tokens + 1)
    ]
    assert expected == SEEN


def test_rows_come_by_branch_arm_and_layer(llama: World) -> None:
    said: list[str] = []
    arms = [DENSE, arm("recency"), arm("exact_mass")]
    rows = open_loop(llama.trace, arms, progress=said.append)
    keys = [(row.branch, row.arm, row.layer) for row in rows]
    assert keys == [
        (b, one.label, layer) for b in range(len(llama.trace.branches)) for one in arms for layer in range(4)
    ]
    assert {(row.trace, row.workload) for row in rows} == {("trace", "needle_multikey")}
    assert said == [*(f"decide {one.label}" for one in arms), *(f"layer {n}/4" for n in range(1, 5))]


def test_chunks_of_queries_change_nothing(llama: World, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = [DENSE, arm("knorm"), arm(Fp8Once())]
    whole = open_loop(llama.trace, arms)
    monkeypatch.setattr("kvassay.replay.open.ELEMENTS", 7 * 4 * 430)  # seven queries at a time
    for a, b in zip(whole, open_loop(llama.trace, arms), strict=True):
        assert (a.output_error, a.retained_mass) == pytest.approx((b.output_error, b.retained_mass), rel=1e-5)
        if a.arm == "dense":
            assert (b.output_error, b.retained_mass) == (0.0, 1.0)


# -- refusals ----------------------------------------------------------------------------------------------


def test_what_it_covers() -> None:
    refused = {name: covers(make(name)) for name in names() if covers(make(name))}
    assert set(refused) >= {"paged-eviction", "kivi", "svd", "m3-distilled"}
    assert not set(refused) & {"dense", "fp8", "snapkv", "knorm", "quest", "locks", "m3-exact-mass", "hindsight"}
    assert "while decoding (every_step)" in str(refused["kivi"])
    assert "while decoding (every_n)" in str(refused["paged-eviction"])
    assert "calibration trace" in str(refused["svd"])
    assert covers(make("svd"), calibrated=True) is None
    assert "takes the model" in str(covers(make("dense"), Prefill.OWN))


def test_an_arm_it_does_not_cover_is_refused(llama: World) -> None:
    with pytest.raises(PolicyError, match=r"arm 'kivi.*' cannot run in the open loop: its policy decides .*every_step"):
        open_loop(llama.trace, [DENSE, Arm(make("kivi", group=8), None, PROTECTION)])


def test_a_trace_without_branches_is_refused(tmp_path: Path) -> None:
    trace = synthetic.make(tmp_path / "t", tokens=20, branches=())
    with pytest.raises(ExperimentError, match="has no branches"):
        open_loop(trace, [DENSE])


# -- memory ------------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Bytes of all tensor storages made since, and the most at one time; mapped files are made before."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {x.untyped_storage()._cdata for x in _tensors((args, kwargs or {}))}
        for tensor in (x for x in _tensors(out) if not x.is_meta):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known and storage._cdata not in before:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [x for value in tree.values() for x in _tensors(value)]
    return [x for value in tree for x in _tensors(value)] if isinstance(tree, list | tuple) else []


def test_memory_does_not_grow_with_the_layers(tmp_path: Path) -> None:
    tokens, dim, heads = 1200, 64, 2
    arms = [DENSE, *(arm(n) for n in ("random", "snapkv", "knorm", "nearest-merge", "exact_mass")), arm(Fp8Once())]
    arms[2] = Arm(make("snapkv", window=8), Budget("keep_tokens", 0.5), PROTECTION)
    peaks = {}
    for layers in (2, 10):
        trace = synthetic.make(tmp_path / str(layers), tokens=tokens, dim=dim, windows=(None,) * layers, branches=(4,))
        with Allocations() as seen:
            open_loop(trace, arms)
        peaks[layers] = seen.most
    layer = tokens * heads * dim * 2 * 4
    assert peaks[2] > layer
    # Eight layers more: their scores and masks, not their keys and values.
    assert peaks[10] - peaks[2] < 8 * layer / 10


# -- for real ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma-3-270m"])
def test_dense_reproduces_the_embedded_models_attention(name: str, tmp_path: Path) -> None:
    fetch(name)
    model = load(name)
    text = build("kv_short", model.tokenizer, 1024, questions=1)
    trace = record_sample(model, text, tmp_path / "t", RecordOptions(prefill_chunk=300, taps=("output",)))
    found = output_errors(trace)
    assert len(found) == 2 * len(trace.layout.layers)
    assert max(e.error for e in found) < 1e-5
