"""The bridge to kvpress: what is sent, what may come back, what is said when it goes wrong. Needs no kvpress."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvassay.cache.data import LayerData
from kvassay.cache.edits import Evict
from kvassay.cache.ops import GroupSpec
from kvassay.cache.reclaim import count
from kvassay.errors import BudgetError, EvidenceMissing, PolicyError
from kvassay.layout.model import Rope
from kvassay.policy import registry
from kvassay.policy.base import EVERY_QUERY, Artefact, Memory
from kvassay.policy.kvpress import bridge, helper
from kvassay.policy.kvpress.critical import KvpressCritical
from kvassay.policy.kvpress.policy import Kvpress
from kvassay.policy.kvpress.presses import PRESSES, REFUSED, parse
from kvassay.policy.views import Meter
from kvassay.policy.weights import Projection
from tests.policy.build import allowance, cache, dense, layer, memory, ragged, random_kv, random_q, view
from tests.policy.kvpress_setup import fake_python
from tests.policy.paged import Run

N = 24


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_python(tmp_path_factory.mktemp("kvpress"))


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch, fake: Path) -> Iterator[None]:
    monkeypatch.setenv(bridge.SETTING, str(fake))
    before = dict(bridge._PEERS)
    yield
    for key, peer in list(bridge._PEERS.items()):
        if key not in before:
            peer.close()
            del bridge._PEERS[key]


def masks(policy: Kvpress, keep: int, *, layers: int = 1, sink: int = 0, recent: int = 0) -> list[list[list[int]]]:
    """Positions kept, by layer and KV head."""
    views = [
        view(policy, dense(N, seed=at), of=layer(at), queries=random_q(N), sink=sink, recent=recent)
        for at in range(layers)
    ]
    decision = policy.decide(cache(*views), {}, memory(), allowance(keep, N, sink, recent))
    edits = [decision.edits[at][0] for at in range(layers)]
    assert all(isinstance(edit, Evict) for edit in edits)
    return [[row.nonzero().flatten().tolist() for row in edit.keep] for edit in edits]  # type: ignore[union-attr]


# -- what comes back ------------------------------------------------------------------------------------------------


def test_the_helpers_mask_becomes_the_decision_of_every_layer() -> None:
    assert masks(Kvpress("KnormPress"), 5, layers=3) == [[list(range(5))] * 2] * 3


def test_protected_tokens_are_named_to_the_helper() -> None:
    assert masks(Kvpress("KnormPress"), 6, sink=1, recent=2) == [[[0, 1, 2, 3, 22, 23]] * 2]


def test_a_budget_of_everything_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(bridge.SETTING)
    shown = view(Kvpress("KnormPress"), dense(N))
    assert not Kvpress("KnormPress").decide(cache(shown), {}, memory(), allowance(N, N)).edits


def test_one_process_serves_a_whole_run() -> None:
    masks(Kvpress("KnormPress"), 5)
    first = bridge.peer()
    masks(Kvpress("AdaKVPress(KnormPress)"), 5, layers=2)
    assert bridge.peer() is first and first.running
    first.close()
    assert not first.running and masks(Kvpress("KnormPress"), 5) and bridge.peer() is not first


@pytest.mark.parametrize(
    "say, says",
    [
        ("raise", "kvpress: AssertionError: Query length 5 should be greater than the window size 64"),
        ("garbage", "answers what no kvpress helper does"),
        ("silence", "KnormPress, layer 0: keep mask none, bool [2, 24] needed"),
        ("shape", "KnormPress, layer 0: keep mask torch.bool [2, 23], bool [2, 24] needed"),
        ("float", "KnormPress, layer 0: keep mask torch.float32 [2, 24], bool [2, 24] needed"),
        ("die", "ended: MemoryError: no more; make kvpress-setup"),
    ],
)
def test_what_goes_wrong_is_said_on_one_line_and_the_next_question_is_answered(say: str, says: str) -> None:
    with pytest.raises(PolicyError) as caught:
        masks(Kvpress("KnormPress", options=f"say={say}"), 5)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert masks(Kvpress("KnormPress"), 5) == [[list(range(5))] * 2]


def test_a_press_that_keeps_more_than_the_budget_is_refused() -> None:
    with pytest.raises(BudgetError, match="KnormPress keeps 48 tokens in 2 heads, 5 each may be"):
        masks(Kvpress("KnormPress", options="say=more"), 5)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPRESS_FAKE_VERSION", "0.6.0")
    monkeypatch.setenv(bridge.SETTING, str(fake_python(tmp_path)))
    with pytest.raises(PolicyError, match=r"asks for kvpress 0\.5\.5, .*python has 0\.6\.0"):
        masks(Kvpress("KnormPress"), 5)
    assert masks(Kvpress("KnormPress", version="0.6.0"), 5)


# -- the environment ------------------------------------------------------------------------------------------------


def test_without_an_environment_it_says_how_to_make_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(bridge.SETTING)
    with pytest.raises(PolicyError) as caught:
        masks(Kvpress("KnormPress"), 5)
    said = str(caught.value)
    assert "KVASSAY_KVPRESS_PYTHON is not set and there is no .venv-kvpress/bin/python" in said
    assert "make kvpress-setup" in said and "\n" not in said


def test_the_environment_that_make_makes_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(bridge.SETTING)
    (tmp_path / ".venv-kvpress" / "bin").mkdir(parents=True)
    fake_python(tmp_path / ".venv-kvpress" / "bin")
    assert masks(Kvpress("KnormPress"), 5) == [[list(range(5))] * 2]


def test_a_python_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(bridge.SETTING, str(tmp_path / "python"))
    with pytest.raises(PolicyError, match=f"{bridge.SETTING}={tmp_path}/python is no file"):
        masks(Kvpress("KnormPress"), 5)
    (tmp_path / "python").write_text("no program")
    with pytest.raises(PolicyError, match=r"cannot be run \(Permission denied\)"):
        masks(Kvpress("KnormPress"), 5)


# -- presses and options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "press, options, says",
    [
        ("SnapPress", "", "unknown press 'SnapPress' (did you mean 'SnapKVPress'?)"),
        ("DMSPress", "", "cannot ask DMSPress: a threshold on scores decides"),
        ("AdaKVPress", "", "AdaKVPress is made round one of KnormPress, "),
        ("AdaKVPress(AdaKVPress)", "", "AdaKVPress is made round one of "),
        ("AdaKVPress(ObservedAttentionPress)", "", "AdaKVPress is made round one of "),
        ("AdaKVPress(QFilterPress)", "", "cannot ask QFilterPress: it loads parts trained"),
        ("BlockPress(SnapKVPress)", "", "made round one of KnormPress, KeyDiffPress, LagKVPress, CURPress"),
        ("KnormPress(SnapKVPress)", "", "KnormPress is made round no other press"),
        ("AdaKVPress(SnapKVPress", "", "is not of the form SnapKVPress or"),
        ("A(B(C))", "", "is not of the form SnapKVPress or"),
        ("SnapKVPress", "window_size", "'window_size' is not of the form name=value"),
        ("SnapKVPress", "kernel_size=3;kernel_size=5", "'kernel_size=5' is not of the form"),
        ("SnapKVPress", "compression_ratio=0.5", "set by the budget"),
        ("CriticalKVPress(SnapKVPress)", "", "reads output projections; use kvpress-critical"),
    ],
)
def test_a_press_that_cannot_be_asked_is_refused_with_the_reason(press: str, options: str, says: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Kvpress(press, options)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_options_become_numbers_truths_and_texts() -> None:
    chain = parse("AdaKVPress(SnapKVPress)", "window_size=32; alpha_safeguard=0.1;x=true;leverage_type=key")
    assert chain.names == ("AdaKVPress", "SnapKVPress")
    assert chain.options == {"window_size": 32, "alpha_safeguard": 0.1, "x": True, "leverage_type": "key"}


@pytest.mark.parametrize(
    "press, options, queries",
    [
        ("KnormPress", "", 0),
        ("LeverageScorePress", "", 0),
        ("TOVAPress", "", 1),
        ("SnapKVPress", "", 64),
        ("PyramidKVPress", "window_size=16", 16),
        ("AdaKVPress(SnapKVPress)", "window_size=8", 8),
        ("ChunkKVPress(TOVAPress)", "", 1),
        ("AdaKVPress(ExpectedAttentionPress)", "", EVERY_QUERY),
        ("ObservedAttentionPress", "", EVERY_QUERY),
    ],
)
def test_a_policy_asks_for_the_queries_its_press_reads(press: str, options: str, queries: int) -> None:
    assert Kvpress(press, options).queries_needed == queries


def test_a_label_is_read_back() -> None:
    for policy in (Kvpress("AdaKVPress(SnapKVPress)", "window_size=16;kernel_size=3"), Kvpress("KnormPress")):
        assert registry.parse(policy.label) == policy


def test_no_press_is_both_asked_and_refused() -> None:
    assert not set(PRESSES) & set(REFUSED) and all(REFUSED.values())


def test_the_page_names_every_press() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kvpress.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\w+Press\b", page))
    assert named == (set(PRESSES) | set(REFUSED)) - {"BasePress", "ScorerPress"}


# -- what is sent ---------------------------------------------------------------------------------------------------

ROPE = Rope(100.0, 8)


def turned(x: Tensor, first: int) -> Tensor:
    """Rotary embedding as multiplication of complex numbers, element i with element i + dim / 2."""
    half = x.shape[-1] // 2
    angle = torch.arange(first, first + x.shape[1], dtype=torch.float64)[:, None] * 100.0 ** (
        -torch.arange(0, half, dtype=torch.float64) / half
    )
    z = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def test_only_the_windows_queries_go_over_and_without_their_rotation() -> None:
    policy, plain = Kvpress("SnapKVPress", "window_size=6"), random_q(10)
    shown = view(policy, dense(N), of=layer(rope=ROPE), queries=turned(plain, N - 10))
    sent = policy.shown(shown, memory())
    assert set(sent) == {"keys", "values", "forced", "inv_freq", "queries"}
    torch.testing.assert_close(sent["queries"], plain[:, -6:].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sent["inv_freq"], 100.0 ** (-torch.arange(4) / 4))


def test_a_press_without_queries_is_sent_keys_values_and_what_must_stay_and_charged_for_them() -> None:
    meter, policy = Meter(2.0), Kvpress("KnormPress")
    sent = policy.shown(view(policy, dense(N), of=layer(rope=ROPE), sink=2, meter=meter), memory())
    assert set(sent) == {"keys", "values", "forced"}
    assert sent["forced"].tolist() == [[True] * 2 + [False] * (N - 2)] * 2
    assert meter.touched == {"keys": 2 * N * 8 * 2.0, "values": 2 * N * 8 * 2.0}


def test_a_record_of_too_few_queries_is_refused() -> None:
    policy = Kvpress("SnapKVPress")
    with pytest.raises(EvidenceMissing, match="needs the last 64 queries of layer 0, there are 3"):
        policy.shown(view(policy, dense(N), queries=random_q(3)), memory())


def test_a_layer_that_has_been_evicted_from_is_refused() -> None:
    policy = Kvpress("KnormPress")
    with pytest.raises(PolicyError, match="takes whole contexts, layer 0 has been evicted from"):
        policy.shown(view(policy, ragged(dense(N), [[0, 1], [1]]), length=N), memory())


@pytest.mark.parametrize(
    "change, says",
    [
        ({"softcap": 30.0}, "knows no soft-cap and no sinks, layer 0 has"),
        ({"sinks": True}, "knows no soft-cap and no sinks, layer 0 has"),
        ({"rope": Rope(100.0, 8, interleaved=True)}, "rotates whole heads in halves, layer 0 does not"),
        ({"rope": Rope(100.0, 4)}, "rotates whole heads in halves, layer 0 does not"),
    ],
)
def test_attention_that_presses_do_not_know_is_refused_where_it_is_read(change: dict[str, Any], says: str) -> None:
    of = replace(layer(), **change)
    for press in ("TOVAPress", "LeverageScorePress"):
        policy = Kvpress(press)
        if "rope" in change or press == "TOVAPress":
            with pytest.raises(PolicyError, match=says):
                policy.shown(view(policy, dense(N), of=of, queries=random_q(N)), memory())
    assert Kvpress("KnormPress").shown(view(Kvpress("KnormPress"), dense(N), of=of), memory())


# -- what it really frees -------------------------------------------------------------------------------------------


def test_a_head_wise_mask_is_counted_as_what_it_frees_which_in_a_shared_table_is_nothing() -> None:
    """AdaKVPress masks keys and stores them all; its mask, carried out, leaves every block half full."""
    groups = [GroupSpec(0, (0,), (2,), 4)]
    freed = {}
    for press in ("AdaKVPress(KnormPress)", "KnormPress"):
        rows = torch.zeros(2, N, dtype=torch.bool)
        for head, kept in enumerate(masks(Kvpress(press), N // 2)[0]):
            rows[head, kept] = True
        freed[press] = count({0: rows.numpy()}, groups)
    ada, plain = freed.values()
    assert [ada[mode].blocks for mode in ("whole_block", "per_layer_tables", "per_head_tables")] == [0, 0, 0]
    assert [plain[mode].blocks for mode in ("whole_block", "per_layer_tables", "per_head_tables")] == [3, 3, 3]
    assert ada["compaction"].blocks == plain["compaction"].blocks == 3  # at a price: what stays must be moved together
    assert ada["compaction"].moved_slots > plain["compaction"].moved_slots == 0


def test_the_cache_gives_back_no_block_for_it_and_three_for_the_same_number_of_tokens_in_a_row() -> None:
    held = {}
    k, v = random_kv(N)
    for press in ("AdaKVPress(KnormPress)", "KnormPress"):
        run = Run(Kvpress(press), layer(), k, v, tokens=N // 2, block_size=4, memory=memory())
        run.prefill(N)
        table = run.cache.ledger.table(run.seq, 0)
        held[press] = sum(block != 0 for block in table)
        assert [int(row.sum()) for row in run.data.alive] == [N // 2] * 2
    assert held == {"AdaKVPress(KnormPress)": N // 4, "KnormPress": N // 8}


# -- the helper's own parts, in this process ------------------------------------------------------------------------


def test_a_message_is_read_back_and_one_that_breaks_off_is_none() -> None:
    stream = io.BytesIO()
    helper.send(stream, {"keep": 3}, {"a": torch.arange(6).view(2, 3), "b": torch.tensor([True, False])})
    helper.send(stream, {"none": None})
    whole = stream.getvalue()
    stream.seek(0)
    first, second = helper.receive(stream), helper.receive(stream)
    assert first is not None and first[0]["keep"] == 3
    assert torch.equal(first[1]["a"], torch.arange(6).view(2, 3)) and first[1]["b"].tolist() == [True, False]
    assert second is not None and second == ({"none": None, "bytes": 0}, {})
    assert helper.receive(stream) is None
    assert helper.receive(io.BytesIO(whole[:60])) is None and helper.receive(io.BytesIO(whole[:10])) is None
    with pytest.raises(ValueError):
        helper.receive(io.BytesIO(b"[1, 2]\n"))


def test_rows_are_found_again_copies_in_order_and_a_changed_row_is_noticed() -> None:
    among = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    among[0, 7] = among[0, 2] = among[0, 5]
    picked = torch.tensor([[5, 1, 2, 8], [0, 8, 3, 4]])
    rows = among.gather(1, picked[..., None].expand(-1, -1, 4))
    assert helper.located(rows, among).tolist() == [[2, 1, 5, 8], [0, 8, 3, 4]]
    rows[1, 2, 3] += 1e-6
    with pytest.raises(ValueError, match="changed keys or values"):
        helper.located(rows, among)


class ScorerPress:
    """As kvpress's: a score, and the best of it."""

    def __init__(self, compression_ratio: float = 0.0, scale: float = 1.0) -> None:
        self.compression_ratio, self.scale = compression_ratio, scale

    def score(self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any) -> Tensor:
        return self.scale * keys[..., 0]

    def compress(
        self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        kept = max(1, int(keys.shape[2] * (1 - self.compression_ratio)))
        best = self.score(module, hidden, keys, values, attentions, kwargs).topk(kept).indices
        best = best[..., None].expand(-1, -1, -1, module.head_dim)
        return keys.gather(2, best), values.gather(2, best)


class HeadWise:
    """As AdaKVPress: masks the worst of all heads."""

    def __init__(self, press: Any, floor: int = 0) -> None:
        self.press = press

    def compress(
        self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        score = self.press.score(module, hidden, keys, values, attentions, kwargs)
        _, heads, tokens = score.shape
        gone = heads * (tokens - int(tokens * (1 - self.press.compression_ratio)))
        worst = (-score.reshape(-1)).topk(gone).indices
        module.masked_key_indices = (torch.zeros_like(worst), worst // tokens, worst % tokens)
        return keys, values


class Reads(ScorerPress):
    """Scores by what it reads of the stand-in: the projection of the hidden states, turned back as Llama turns it."""

    def score(self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any) -> Tensor:
        cos, sin = kwargs["position_embeddings"]
        q = module.q_proj(hidden).view(1, hidden.shape[1], -1, module.head_dim).transpose(1, 2)
        a, b = q.chunk(2, -1)
        self.q = q * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]
        self.k = module.k_proj(hidden).view(1, hidden.shape[1], -1, module.head_dim).transpose(1, 2)
        seen.update(q=self.q[0], k=self.k[0], attentions=attentions)
        return self.q.view(1, 2, -1, *self.q.shape[2:])[:, :, 0, :, 0]


seen: dict[str, Any] = {}
KVPRESS = SimpleNamespace(ScorerPress=ScorerPress, HeadWise=HeadWise, Reads=Reads)


def question(press: str, keep: int, **more: Any) -> dict[str, Any]:
    names = press.replace(")", "").split("(")
    base = {"press": names, "options": {}, "attention": False, "keep": keep, "ordinal": 0, "layers": 1, "q_heads": 4}
    return {**base, "scale": 8**-0.5, "seed": 0, **more}


def job(tokens: int, forced: list[int] | None = None) -> dict[str, Tensor]:
    k, v = (x.float() for x in random_kv(tokens))
    must = torch.zeros(2, tokens, dtype=torch.bool)
    must[:, forced or []] = True
    return {"keys": k, "values": v, "forced": must}


def test_a_press_keeps_its_best_and_what_must_stay() -> None:
    tensors = job(N)
    worst = tensors["keys"][0, :, 0].argmin().item()
    for forced in ([], [int(worst)]):
        tensors = job(N, forced)
        found = helper.answer(KVPRESS, question("ScorerPress", 7), tensors)
        wanted = tensors["keys"][..., 0].masked_fill(tensors["forced"], 100.0).topk(7).indices
        assert [row.nonzero().flatten().tolist() for row in found["keep"]] == [sorted(row) for row in wanted.tolist()]
        assert torch.equal(found["score"], tensors["keys"][..., 0])


def test_a_head_wise_press_is_read_off_its_mask_and_spares_what_must_stay() -> None:
    tensors = job(N, [0])
    keep = helper.answer(KVPRESS, question("HeadWise(ScorerPress)", 7), tensors)["keep"]
    flat = tensors["keys"][..., 0].masked_fill(tensors["forced"], 100.0).flatten()
    assert sorted(keep.flatten().nonzero().flatten().tolist()) == sorted(flat.topk(14).indices.tolist())
    assert keep[:, 0].all()


def test_options_go_to_the_press_that_takes_them() -> None:
    tensors = job(N)
    turned_round = helper.answer(KVPRESS, question("HeadWise(ScorerPress)", 7, options={"scale": -1.0}), tensors)
    lowest = (-tensors["keys"][..., 0].flatten()).topk(14).indices.tolist()
    assert sorted(turned_round["keep"].flatten().nonzero().flatten().tolist()) == sorted(lowest)
    with pytest.raises(ValueError, match=r"no option 'window' in HeadWise\(ScorerPress\)"):
        helper.answer(KVPRESS, question("HeadWise(ScorerPress)", 7, options={"window": 3}), tensors)


def test_the_stand_in_gives_back_recorded_queries_and_keys_before_rotation() -> None:
    q, tensors = random_q(N), job(N)
    plain, tensors["keys"] = tensors["keys"], turned(tensors["keys"], 0).float()
    tensors |= {"queries": q.float(), "inv_freq": 100.0 ** (-torch.arange(4) / 4)}
    helper.answer(KVPRESS, question("Reads", 5, attention=True), tensors)
    torch.testing.assert_close(seen["q"], turned(q, 0).float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen["k"], plain, rtol=1e-4, atol=1e-5)
    logits = seen["q"].double() @ tensors["keys"].double().repeat_interleave(2, 0).transpose(1, 2) * 8**-0.5
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    rows = logits.masked_fill(~causal, -torch.inf).softmax(-1)
    torch.testing.assert_close(seen["attentions"][0].double(), rows, rtol=1e-4, atol=1e-6)


def test_a_press_that_reads_queries_that_were_not_recorded_is_found_out() -> None:
    with pytest.raises(ValueError, match="Reads scored NaN or infinity"):
        helper.answer(KVPRESS, question("Reads", 5), job(N) | {"queries": random_q(3).float()})


def test_attention_maps_that_would_not_fit_are_refused() -> None:
    q = torch.zeros(1, 24_000, 1)
    with pytest.raises(ValueError, match="1 attention maps of 24000 x 24000 are over 2 GiB"):
        helper.attention(q, q, 1.0)


@settings(deadline=None)
@given(tokens=st.integers(2, 131_072), data=st.data())
def test_the_ratio_comes_out_at_the_very_number_of_tokens(tokens: int, data: st.DataObject) -> None:
    keep = data.draw(st.integers(1, tokens - 1))
    press = helper.build(KVPRESS, ["ScorerPress"], 1 - (keep + 1e-9) / tokens, {})[0]
    assert math.floor(tokens * (1 - press.compression_ratio)) == int(tokens * (1 - press.compression_ratio)) == keep


# -- output projections ---------------------------------------------------------------------------------------------


def test_critical_presses_are_sent_the_output_projection_they_were_fitted_with() -> None:
    policy, weight = KvpressCritical(options="window_size=4"), torch.randn(16, 32)
    artefact = policy.fit(SimpleNamespace(sha256="text", outputs=lambda: {0: Projection(weight)}))  # type: ignore[arg-type]
    assert set(artefact.tensors) == {"layer0"} and artefact.source_sha256 == "text"
    shown = view(policy, dense(N), queries=random_q(N))
    assert policy.shown(shown, Memory(artefact=artefact))["output"] is weight
    with pytest.raises(PolicyError, match="has no artefact"):
        policy.shown(shown, memory())
    with pytest.raises(PolicyError, match="KnormPress reads no output projection; use kvpress"):
        KvpressCritical("KnormPress")


def test_the_stand_in_holds_it() -> None:
    weight = torch.randn(16, 32)
    recorded = helper.Recorded(question("ScorerPress", 5), job(N) | {"output": weight})
    assert recorded.module.config.hidden_size == 16 and recorded.module.o_proj.weight is weight
    assert Artefact({"layer0": weight}).nbytes == 16 * 32 * 4


def test_keys_and_values_of_different_size_are_refused() -> None:
    policy, (k, _) = Kvpress("KnormPress"), random_kv(N)
    with pytest.raises(PolicyError, match="layer 0 has keys and values of different size"):
        policy.shown(view(policy, LayerData.dense(k, k[..., :4]), of=layer()), memory())
