"""KARA's reconstruction: scorers against NumPy, Token2Chunk on cases worked out by hand, windows on the real cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvassay.cache.data import LayerData
from kvassay.cache.edits import Evict
from kvassay.errors import EvidenceMissing, PolicyError
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.kara import Kara
from kvassay.policy.token2chunk import token2chunk
from kvassay.policy.views import LayerView
from tests.policy.build import DIM, KV_HEADS, Q_HEADS, cache, dense, memory, random_q, view

N, W, GROUP = 40, 16, Q_HEADS // KV_HEADS


def window(amount: float) -> Allowance:
    return Allowance(Budget("per_window", amount), 0, 20, Protection(0, 0))


def shown(policy: Kara, data: LayerData, q: Tensor) -> LayerView:
    return view(policy, data, queries=q, length=N)


def test_fewer_tokens_than_a_window_are_none_of_its_business() -> None:
    assert Kara(interval=W).not_applicable(100, 100 + W, window(0.5)) is None
    why = Kara(interval=W).not_applicable(100, 99 + W, window(0.5))
    assert why == f"at most {W - 1} tokens come after the context, a window is {W}"


@pytest.mark.parametrize("scorer", ["bidirectional", "causal", "last"])
def test_importance_is_the_attention_inside_the_window(scorer: str) -> None:
    policy, data, q = Kara(interval=W, scorer=scorer), dense(N), random_q(W)  # type: ignore[arg-type]
    expected = np.zeros(W)
    for h in range(Q_HEADS):
        logits = q[h].numpy() @ data.k[h // GROUP, N - W :].numpy().T * DIM**-0.5
        if scorer != "bidirectional":
            logits[np.triu_indices(W, 1)] = -np.inf
        rows = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        expected += rows[-8:].sum(0) if scorer == "last" else rows.sum(0)
    score = policy.score(shown(policy, data, q), memory()).numpy()
    assert (score[:, : N - W] == 0).all()
    np.testing.assert_allclose(score[:, N - W :], np.stack([expected] * KV_HEADS), rtol=1e-6)


def test_without_a_mask_every_key_is_judged_by_as_many_queries() -> None:
    """Equal keys and queries: a causal mask favours the early, the bidirectional scorer nobody."""
    flat = LayerData.dense(torch.ones(2, N, DIM), torch.ones(2, N, DIM))
    q = torch.ones(Q_HEADS, W, DIM)
    both = Kara(interval=W).score(shown(Kara(), flat, q), memory())[0, N - W :]
    causal = Kara(interval=W, scorer="causal").score(shown(Kara(), flat, q), memory())[0, N - W :]
    torch.testing.assert_close(both, torch.full((W,), float(Q_HEADS)))
    assert bool((causal.diff() < 0).all())


class TestToken2Chunk:
    #                          0    1    2    3    4    5    6    7    8    9
    IMPORTANCE = torch.tensor([0.1, 9.0, 0.2, 8.0, 0.1, 0.1, 7.0, 0.3, 0.5, 0.4])

    def kept(self, keep: int, **more: object) -> list[int]:
        given = {"share": 0.5, "longest": 16, **more}
        return token2chunk(self.IMPORTANCE, keep, **given).nonzero().flatten().tolist()  # type: ignore[arg-type]

    def test_gaps_between_candidates_are_filled_best_first(self) -> None:
        assert self.kept(6) == [1, 2, 3, 4, 5, 6]  # candidates 1, 3, 6; gaps 1-3 (1 token) and 3-6 (2 tokens)

    def test_a_gap_that_does_not_fit_is_left_and_single_tokens_follow(self) -> None:
        assert self.kept(5, share=0.6) == [1, 2, 3, 6, 8]  # 3-6 needs two more, one is left

    def test_a_gap_longer_than_a_chunk_may_be_is_left(self) -> None:
        assert self.kept(6, longest=3) == [1, 2, 3, 6, 8, 9]

    def test_without_chunks_it_is_top_k(self) -> None:
        assert self.kept(4, longest=1) == [1, 3, 6, 8]

    def test_candidates_only(self) -> None:
        assert self.kept(4, share=1.0) == [1, 3, 6, 8]

    def test_the_order_of_gaps_is_a_choice(self) -> None:
        importance = torch.tensor([1.0, 0.0, 1.1, *[0.0] * 10, 10.0, 0.9, 0.9, 10.0])
        by_value, by_cost = (
            token2chunk(importance, 6, share=0.6, longest=8, order=order).nonzero().flatten().tolist()
            for order in ("value", "cost")
        )
        assert by_value == [0, 2, 13, 14, 15, 16] and by_cost == [0, 1, 2, 13, 14, 16]

    def test_forced_tokens_come_first_and_inside_the_budget(self) -> None:
        assert self.kept(3, forced=[9]) == [1, 3, 9]
        assert self.kept(2, forced=[8, 9]) == [8, 9]

    def test_forced_tokens_take_no_candidates_place(self) -> None:
        """Three of six stay anyway: of the other three two are candidates, 1 and 3, and their gap takes the last."""
        assert self.kept(6, forced=[7, 8, 9]) == [1, 2, 3, 7, 8, 9]
        assert self.kept(6, forced=[7, 8, 9], longest=1) == [1, 3, 6, 7, 8, 9]

    @settings(max_examples=50, deadline=None)
    @given(
        importance=st.lists(st.floats(0, 10), min_size=1, max_size=40),
        share=st.floats(0.01, 1.0),
        longest=st.integers(1, 20),
        data=st.data(),
    )
    def test_exactly_as_many_as_asked(
        self, importance: list[float], share: float, longest: int, data: st.DataObject
    ) -> None:
        keep = data.draw(st.integers(1, len(importance)))
        mask = token2chunk(torch.tensor(importance), keep, share=share, longest=longest)
        assert int(mask.sum()) == keep and mask.shape == (len(importance),)


class TestWindows:
    def decide(self, policy: Kara, length: int, context: int) -> list[int] | None:
        data, q = dense(length), random_q(W)
        seen = view(policy, data, queries=q, length=length)
        decision = policy.decide(cache(seen, context=context), {0: policy.score(seen, memory())}, memory(), window(0.5))
        if decision.empty:
            return None
        edit = decision.edits[0][0]
        assert decision.compact and isinstance(edit, Evict)
        return edit.keep.nonzero().flatten().tolist()

    def test_the_prompt_and_older_windows_stay_and_half_of_the_newest_goes(self) -> None:
        kept = self.decide(Kara(interval=W, guard=2), 60, 20)
        assert kept is not None and kept[:44] == list(range(44)) and len(kept) == 44 + 8 and kept[-2:] == [58, 59]

    def test_a_window_that_reaches_into_the_prompt_is_left(self) -> None:
        assert self.decide(Kara(interval=W), 30, 20) is None

    def test_too_few_queries_are_refused(self) -> None:
        policy = Kara(interval=W)
        with pytest.raises(EvidenceMissing, match="last 16 queries of layer 0, there are 3"):
            policy.score(view(policy, dense(N), queries=random_q(3)), memory())

    @pytest.mark.parametrize("wrong", [{"share": 0.0}, {"interval": 1}, {"scorer": "both"}, {"order": "x"}])
    def test_wrong_parameters_are_refused(self, wrong: dict[str, object]) -> None:
        with pytest.raises(PolicyError, match=next(iter(wrong))):
            Kara(**wrong)  # type: ignore[arg-type]
