"""Compositions in the replay, against float64 by hand and against each part alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvassay.errors import BudgetError
from kvassay.measure.result import BranchResult
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.registry import make, parse
from kvassay.replay.arms import Arm
from kvassay.replay.bytes import held
from kvassay.replay.closed import Replay
from kvassay.replay.open import open_loop
from kvassay.replay.protocol import Protocol
from tests.replay.oracle import Oracle, code
from tests.replay.plain import top
from tests.replay.test_contract_encoding import fresh
from tests.replay.watch import Watch, contents, same
from tests.replay.worlds import World, fed

SINK, RECENT = 4, 16
PROTECTION = Protection(SINK, RECENT)
DENSE = Arm(make("dense"), None, PROTECTION)


def arm(text: str, budget: str | None = None) -> Arm:
    return Arm(parse(text), None if budget is None else Budget.parse(budget), PROTECTION)


def int8_rows(x: Tensor) -> Tensor:
    """[tokens, dim], a code per row."""
    return torch.stack([code(row.float(), 8) for row in x]) if len(x) else x


def encode(oracle: Oracle, layers: Sequence[int], upto: int, first: int = 0) -> None:
    """Every token from `first` on that is alive, as int8 with a scale of its own."""
    for layer in layers:
        for side in (oracle.k, oracle.v):
            side[layer] = side[layer].clone()
            for head in range(len(side[layer])):
                rows = oracle.alive[layer][head].clone()
                rows[:first], rows[upto:] = False, False
                side[layer][head, rows] = int8_rows(side[layer][head, rows])


def encode_newest(oracle: Oracle, layer: int) -> None:
    if layer in oracle.full:
        encode(oracle, [layer], oracle.length, oracle.length - 1)


def window_scores(oracle: Oracle, layer: int, world: World, window: int) -> Tensor:
    """SnapKV's with a pooling kernel of 1: mean attention of the last queries, float64 [kv_heads, tokens]."""
    shape, queries = world.trace.layout.layers[layer], world.trace.prefix.q(layer)[-window:].double()
    keys = oracle.k[layer]
    group = queries.shape[1] // len(keys)
    score = torch.zeros(keys.shape[:2], dtype=torch.float64)
    for row, position in enumerate(range(oracle.context - window, oracle.context)):
        for head in range(queries.shape[1]):
            logits = keys[head // group, : position + 1] @ queries[row, head] * shape.scale
            score[head // group, : position + 1] += torch.softmax(logits, 0) / (window * group)
    score[:, -window:] = 2.0
    return score


@pytest.mark.parametrize("world", ["gemma"], indirect=True)
def test_what_an_eviction_leaves_is_encoded(world: World, watch: Watch) -> None:
    one = arm("snapkv(window=16, kernel=1)+int8", "keep=0.25")
    rows = watch.run(world, [DENSE, one])
    oracle = Oracle(world)
    keep = oracle.context // 4
    for layer in oracle.full:
        score = window_scores(oracle, layer, world, 16)
        oracle.alive[layer] = top(score, keep, SINK, RECENT, oracle.context)
    encode(oracle, oracle.full, oracle.context)
    oracle.written = encode_newest
    layout = world.trace.layout
    per_token = sum(kv.kv_heads * (kv.k_dim + kv.v_dim + 8) for kv in (layout.layers[i].kv for i in oracle.full))
    for index, branch in enumerate(world.trace.branches):
        expected = fresh(oracle).answer(branch)
        torch.testing.assert_close(watch.logits[one.label, index].double(), expected, rtol=0, atol=1e-3)
        assert float((watch.logits["dense", index].double() - expected).abs().max()) > 0.05
        (row,) = [row for row in rows if row.arm == one.label and row.branch == index]
        # Codes of a byte, two float16 numbers per row; the window's queries are not kept on, snapkv acts once.
        assert row.retained_bytes_scope == (keep + fed(index)) * per_token


def quest_pages(oracle: Oracle, layer: int, q: Tensor, pages: int, frozen: dict[tuple[int, int], Tensor]) -> Tensor:
    """Pages of 16 by the bound of their keys as they lay when the page filled; forced ones first."""
    keys = oracle.k[layer]
    held = (oracle.length + 15) // 16
    for page in range((oracle.length - 1) // 16):
        if (layer, page) not in frozen:
            frozen[layer, page] = keys[:, page * 16 : page * 16 + 16].clone()
    group = len(q) // len(keys)
    allowed = torch.zeros(len(q), keys.shape[1], dtype=torch.bool)
    for head in range(len(keys)):
        rank = []
        for page in range(held):
            tokens = range(page * 16, min(page * 16 + 16, oracle.length))
            forced = page == held - 1 or any(t < SINK or t >= oracle.length - RECENT for t in tokens)
            low, high = _bounds(frozen[layer, page][head]) if (layer, page) in frozen else (None, None)
            bound = float("inf")
            if not forced and low is not None and high is not None:
                both = [torch.maximum(x * low, x * high).sum() for x in q.view(len(keys), group, -1)[head]]
                bound = float(max(both))
            rank.append(bound)
        best = sorted(range(held), key=lambda page: -rank[page])[:pages]
        for page in best:
            allowed[head * group : (head + 1) * group, page * 16 : page * 16 + 16] = True
    return allowed


def _bounds(keys: Tensor) -> tuple[Tensor, Tensor]:
    """float16 outwards, as float64."""
    low, high = keys.amin(0), keys.amax(0)
    return -_up(-low), _up(high)


def _up(x: Tensor) -> Tensor:
    half = x.float().half()
    over = half.float() < x.float()
    return torch.where(over, half.nextafter(torch.full_like(half, torch.inf)), half).double()


@pytest.mark.parametrize("world", ["llama"], indirect=True)
def test_pages_are_chosen_by_the_codes_and_read_as_codes(world: World, watch: Watch) -> None:
    one = arm("quest(dense_layers=0)+int8", "read=96")
    rows = watch.run(world, [DENSE, one])
    compressed = Oracle(world)
    encode(compressed, compressed.full, compressed.context)
    layout = world.trace.layout
    kv = layout.layers[0].kv
    for index, branch in enumerate(world.trace.branches):
        oracle = fresh(compressed)
        frozen: dict[tuple[int, int], Tensor] = {}

        def select(o: Oracle, layer: int, q: Tensor, frozen: dict[tuple[int, int], Tensor] = frozen) -> Tensor:
            return quest_pages(o, layer, q, 6, frozen)

        oracle.select = select
        oracle.written = encode_newest
        expected = oracle.answer(branch)
        torch.testing.assert_close(watch.logits[one.label, index].double(), expected, rtol=0, atol=1e-3)
        assert float((watch.logits["dense", index].double() - expected).abs().max()) > 0.05
        (row,) = [row for row in rows if row.arm == one.label and row.branch == index]
        held_tokens = oracle.context + fed(index)
        side = held_tokens // 16 * kv.k_dim * 2 * 2
        per_layer = kv.kv_heads * (held_tokens * (kv.k_dim + kv.v_dim + 8) + side)
        assert row.retained_bytes_scope == per_layer * len(layout.layers)


PAIRS = [
    ("snapkv(keep=1.0, window=16)+int8", None, "int8", None),
    ("random(keep=1.0)+kivi(group=8, residual=32)", None, "kivi(group=8, residual=32)", None),
    ("snapkv(window=16)+exact_mass(read=1.0)", "keep=0.25", "snapkv(window=16)", "keep=0.25"),
    ("random+exact_mass(read=1.0)", "keep=0.25", "random", "keep=0.25"),
    ("random(keep=1.0)+exact_mass", "read=0.25", "exact_mass", "read=0.25"),
]


def alone(world: World, watch: Watch, one: Arm) -> tuple[list[BranchResult], list[Tensor]]:
    """Rows and logits of one arm, by question; by itself, since the kernel cuts the work of all lanes into pieces."""
    rows = watch.run(world, [DENSE, one])
    return [row for row in rows if row.arm == one.label], [watch.logits[one.label, index] for index in (0, 1)]


@pytest.mark.parametrize(("composed", "budget", "part", "its_budget"), PAIRS)
def test_a_partner_that_does_nothing_changes_no_bit(
    llama: World, watch: Watch, composed: str, budget: str | None, part: str, its_budget: str | None
) -> None:
    watch.proving = False
    (both, logits), (one, expected) = (alone(llama, watch, arm(*x)) for x in ((composed, budget), (part, its_budget)))
    if part.startswith(("snapkv", "random")):  # alone it is fed in chunks, with a selector token by token
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    else:
        assert all(map(torch.equal, logits, expected))
    replay = Replay(llama.loaded, llama.trace, [DENSE], Protocol())
    lanes = [replay.compressed(arm(*x)).lane for x in ((composed, budget), (part, its_budget))]
    assert same(*(contents(lane.cache, lane.seq) for lane in lanes))
    for a, b in zip(both, one, strict=True):
        for name in ("retained_bytes", "retained_bytes_scope", "selected_tokens", "kept", "blocks_freed"):
            assert getattr(a, name) == getattr(b, name), name
        assert a.read_bytes == pytest.approx(b.read_bytes, rel=1e-12)


def test_quest_reading_everything_over_codes_is_the_codes(llama: World, watch: Watch) -> None:
    watch.proving = False
    both, logits = alone(llama, watch, arm("quest(read=1.0, dense_layers=0)+int8"))
    one, expected = alone(llama, watch, arm("int8"))
    for mine, theirs in zip(logits, expected, strict=True):  # its questions come block by block, the others at once
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    kv, layers = llama.trace.layout.layers[0].kv, len(llama.trace.layout.layers)
    for a, b in zip(both, one, strict=True):
        blocks = (llama.trace.prefix.tokens + fed(a.branch)) // 16
        assert a.retained_bytes_scope == b.retained_bytes_scope + blocks * kv.kv_heads * kv.k_dim * 4 * layers
        keys = blocks * 16 * kv.kv_heads * kv.k_dim * llama.trace.layout.element_bytes * layers
        assert (a.policy_bytes, b.policy_bytes) == (keys, 0)


def test_a_bytes_budget_is_held_by_the_replays_own_count(llama: World, watch: Watch) -> None:
    arms = [DENSE, *(arm(f"snapkv(window=16)+{code}", "bytes=0.2") for code in ("int8", "kivi(group=8, residual=32)"))]
    layout = llama.trace.layout
    dense = llama.trace.prefix.tokens * sum(layer.kv.elements for layer in layout.layers) * layout.element_bytes
    replay = Replay(llama.loaded, llama.trace, arms, Protocol())
    for one in arms[1:]:
        lane = replay.compressed(one).lane
        assert 0.2 * 0.97 < held(lane).total / dense <= 0.2
        assert lane.facts["keep_tokens"] > 1.2 * 0.2 * llama.trace.prefix.tokens


def test_a_scan_of_codes_is_charged_as_codes(llama: World, watch: Watch) -> None:
    watch.proving = False
    both, one = (alone(llama, watch, arm(text, "read=0.25"))[0] for text in ("exact_mass+int8", "exact_mass"))
    dim = llama.trace.layout.layers[0].kv.k_dim
    for a, b in zip(both, one, strict=True):
        # Scanned and read alike: an element is a byte for two, a row has 4 bytes more; only the newest token is raw.
        assert a.read_bytes == pytest.approx(b.read_bytes * (dim + 4) / (2 * dim), rel=0.01)


def test_the_open_loop_runs_what_decides_once(llama: World) -> None:
    arms = [DENSE, arm("snapkv(window=16, keep=0.25)+exact_mass", "read=0.1"), arm("snapkv(window=16)", "keep=0.25")]
    rows = open_loop(llama.trace, [*arms, arm("quest(dense_layers=0)+think(prune=0.5)", "read=0.3")])
    mean = {x.label: sum(r.retained_mass for r in rows if r.arm == x.label) for x in arms}
    assert mean[arms[1].label] < mean[arms[2].label] < mean["dense"]
    with pytest.raises(BudgetError, match="not more than the 20 protected"):
        open_loop(llama.trace, [DENSE, arm("snapkv(window=16, keep=16)+exact_mass", "read=0.1")])
