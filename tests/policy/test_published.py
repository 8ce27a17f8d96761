"""Worked values and invariants that the methods' papers and codes state, each on a case of its own.

The equations themselves are in each method's own test; here are the numbers a reader of the paper would look for.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvassay.cache.codec import Packed, TokenGroups
from kvassay.cache.data import LayerData
from kvassay.cache.edits import Bias, Evict, Merge, Quantize
from kvassay.cache.ops import GroupSpec
from kvassay.cache.reclaim import count
from kvassay.policy.allocation import bisect, greedy
from kvassay.policy.base import Memory, Policy
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.distortion import PUBLISHED, table
from kvassay.policy.dynacalkv import DynaCalKV
from kvassay.policy.epikv import EpiKV
from kvassay.policy.kara import Kara
from kvassay.policy.locks import Locks
from kvassay.policy.motion import z_score
from kvassay.policy.rdkv import RDKV
from kvassay.policy.selkv import Chosen, SelKV
from kvassay.policy.token2chunk import token2chunk
from kvassay.policy.twins import shuffled, sign_flipped
from kvassay.policy.views import BlockView, LayerView
from tests.policy.build import DIM, KV_HEADS, Q_HEADS, allowance, cache, dense, memory, random_q, view
from tests.policy.test_selkv import POLICY, SIZE, shown
from tests.policy.test_selkv import N as SELKV_TOKENS

NONE = Protection(0, 0)


class TestRDKV:
    """arXiv 2605.08317 and its code."""

    N, W = 48, 8

    def edit(self, tokens: int, data: LayerData | None = None, n: int = N) -> Quantize:
        policy = RDKV(window=min(self.W, n))
        seen = view(policy, data or dense(n), queries=random_q(n))
        budget = Allowance(Budget("bytes", tokens / n), tokens, n, NONE)
        found = policy.decide(cache(seen), {0: policy.score(seen, memory())}, memory(), budget).edits[0][0]
        assert isinstance(found, Quantize)
        return found

    def test_the_tables_are_those_of_the_appendix(self) -> None:
        assert PUBLISHED["llama-3.1-8b"] == ((0.149, 0.0062, 2.2e-5), (0.313, 0.0140, 4.9e-5))
        assert PUBLISHED["llama-2-13b"] == ((0.288, 0.0124, 5.5e-5), (0.272, 0.0122, 4.4e-5))
        assert PUBLISHED["mistral-7b"] == ((0.280, 0.0116, 6.9e-5), (0.296, 0.0130, 4.5e-5))
        assert PUBLISHED["qwen2.5-72b"] == ((0.296, 0.0164, 4.4e-3), (0.281, 0.0126, 4.4e-5))
        assert PUBLISHED["qwen3-4b"] == ((0.347, 0.0147, 1.5e-4), (0.313, 0.0139, 4.8e-5))
        assert PUBLISHED["default"] == ((0.277, 0.011, 6.1e-5), (0.312, 0.0138, 4.8e-5))

    def test_slopes_of_a_key_channel_and_how_far_apart_2_and_16_bits_are(self) -> None:
        keys, values = (table(side) for side in PUBLISHED["llama-3.1-8b"])
        widths = (0, 2, 4, 8, 16)
        slopes = [[(of[a] - of[b]) / (b - a) for a, b in itertools.pairwise(widths)] for of in (keys, values)]
        assert slopes[0] == pytest.approx([0.4255, 0.0714, 1.54e-3, 2.75e-6], rel=5e-3)
        # Between a token kept at 2 bits and one at 16, weights differ by the ratio of the outer slopes.
        assert slopes[1][0] / slopes[1][3] == pytest.approx(5.6e4, rel=0.01)
        ratio = slopes[1][0] / slopes[1][3]
        for light, bits in ((0.99, [16, 0]), (1.01, [8, 2])):
            assert greedy(torch.tensor([[ratio, light]], dtype=torch.float64), values, 16)[0].tolist() == bits

    def test_four_tokens_of_a_budget_of_one_by_hand(self) -> None:
        """16 bits over 4 tokens, a step's gain per bit being weight x slope (0.3435, 0.1495, 3.49e-3, 6.1e-6)."""
        values = table(PUBLISHED["llama-3.1-8b"][1])
        for weight, bits in (
            ([8.0, 4.0, 2.0, 1.0], [4, 4, 4, 4]),
            ([8.0, 4.0, 0.1, 0.05], [8, 4, 2, 2]),  # after 4, 4: 0.034 for 2 bits, 0.028 for 4, 0.017 for 2
            ([8.0, 4.0, 0.01, 0.005], [8, 8, 0, 0]),  # after 4, 4: 0.028 and 0.014 for 4 each; two tokens are dropped
        ):
            assert greedy(torch.tensor([weight], dtype=torch.float64), values, 16)[0].tolist() == bits

    @settings(max_examples=60, deadline=None)
    @given(weight=st.lists(st.floats(0.0, 50.0), min_size=2, max_size=30), bits=st.integers(0, 300))
    def test_a_heavier_unit_never_gets_fewer_bits(self, weight: list[float], bits: int) -> None:
        given_bits = greedy(torch.tensor([weight], dtype=torch.float64), table(PUBLISHED["default"][1]), bits)[0]
        assert int(given_bits.sum()) <= bits
        ranked = given_bits[torch.tensor(weight, dtype=torch.float64).argsort(stable=True, descending=True)]
        assert bool((ranked.diff() <= 0).all())

    def test_with_room_for_everything_values_stay_whole_and_keys_still_drop_to_8_bits(self) -> None:
        found = self.edit(self.N)
        assert found.value_bits.unique().tolist() == [16] and found.key_bits.unique().tolist() == [8]

    def test_a_head_keeps_at_most_eight_times_its_budget_all_at_2_bits(self) -> None:
        found = greedy(torch.ones(1, 400), table(PUBLISHED["default"][1]), 16 * 20)
        assert found.unique().tolist() == [0, 2] and int((found > 0).sum()) == 8 * 20

    def test_nothing_is_traded_between_heads(self) -> None:
        data = dense(self.N)
        k, v = data.k.clone(), data.v.clone()
        k[1], v[1] = k[1] * 7, v[1].flip(0)
        mine, theirs = self.edit(10, data), self.edit(10, LayerData.dense(k, v))
        assert torch.equal(mine.value_bits[0], theirs.value_bits[0])
        assert torch.equal(mine.key_bits[0], theirs.key_bits[0])
        assert not torch.equal(mine.value_bits[1], theirs.value_bits[1])

    def test_a_prompt_shorter_than_the_window_is_judged_by_all_its_queries(self) -> None:
        data, q = dense(6), random_q(6)
        short, exact = (
            p.score(view(p, data, queries=q), memory()) for p in (RDKV(window=32, kernel=1), RDKV(window=6, kernel=1))
        )
        torch.testing.assert_close(short, exact)

    def test_scales_come_to_a_quarter_bit_per_value_element_at_128_channels(self) -> None:
        token = torch.randn(1, 1, 128, generator=torch.Generator().manual_seed(0))
        size = TokenGroups.encode(token, 2, None).size
        payload = 2 * 128 / 8
        assert size.payload == payload
        assert size.total(2.0) - payload == 0.25 * 128 / 8 == 0.125 * payload

    def test_a_clamped_zero_point_on_a_short_context_loses_more_than_the_channel_holds(self) -> None:
        """Unit variance, mean 6, 96 tokens, 8 bits: 2.4 of the variance clamped, 2.8e-5 not."""
        x = torch.randn(200, 96, generator=torch.Generator().manual_seed(0)) + 6
        plain, clamped = (
            float(((Packed.encode(x, 8, clamp).decode() - x).square().mean(1) / x.var(1, correction=0)).mean())
            for clamp in (False, True)
        )
        assert plain == pytest.approx(2.8e-5, rel=0.25)
        assert clamped == pytest.approx(2.4, rel=0.5)

    def test_a_constant_channel_clamped_decodes_to_about_nothing_and_unclamped_to_itself(self) -> None:
        x = torch.full((1, 96), 6.0)
        assert float(Packed.encode(x, 8, True).decode().abs().max()) < 0.1
        torch.testing.assert_close(Packed.encode(x, 8, False).decode(), x, rtol=1e-3, atol=0)

    def test_the_published_search_may_end_far_over_target_and_says_nothing(self) -> None:
        """Equal scores have no price between nothing and 2 bits for all: up to three times too many."""
        tied = bisect(torch.ones(1, 50), table(PUBLISHED["default"][1]), 25)
        assert int(tied.sum()) in (0, 100)


class TestEpiKV:
    """arXiv 2606.26472."""

    def test_the_newest_128_or_a_quarter_of_the_budget_stay(self) -> None:
        newest = [EpiKV().newest(allowance(keep, 4096)) for keep in (64, 511, 512, 2048, 8192)]
        assert newest == [16, 127, 128, 128, 128]

    def test_the_layers_of_the_paper_and_of_other_depths(self) -> None:
        assert [sorted(EpiKV().taps_in(depth)) for depth in (32, 36, 28)] == [[10, 21], [11, 24], [9, 18]]

    def test_a_score_of_64_samples_lies_within_7_94(self) -> None:
        peak = torch.zeros(1, 64)
        peak[0, -1] = 1.0
        assert float(z_score(peak)[0]) == pytest.approx(math.sqrt(63), rel=1e-4) and math.sqrt(63) < 7.94
        random = torch.rand(500, 64, generator=torch.Generator().manual_seed(0)) ** 30
        assert float(z_score(random).abs().max()) <= 7.94

    CONTEXT, LENGTH = 10, 22
    Z = (0.5, 0.1, 0.1, 0.9, 0.3, 0.2, 0.4, 0.6, 0.0, 0.0, 0.0, 0.0)
    """Scores of the twelve generated tokens."""

    def victim(self, policy: Policy, z: tuple[float, ...] = Z, keep: int = 16) -> int | None:
        """Whom a decision at `LENGTH` tokens drops; the newest quarter of the budget is the last four."""
        state = {
            "z": torch.stack([torch.tensor(z), torch.zeros(len(z))]),
            "position": torch.arange(self.CONTEXT, self.LENGTH, dtype=torch.int32),
        }
        mem = Memory(state=state, rng=torch.Generator().manual_seed(0))
        shown_layers = [view(policy, dense(self.LENGTH, seed=at)) for at in range(2)]
        seen = cache(shown_layers[0], context=self.CONTEXT)
        scores = {0: policy.score(shown_layers[0], mem)}
        decision = policy.decide(seen, scores, mem, allowance(keep, self.CONTEXT))
        return decision.reuse

    def test_the_lowest_score_outside_prompt_and_newest_goes_and_of_equals_the_older(self) -> None:
        assert self.victim(EpiKV()) == 11  # 11 and 12 score 0.1; 18 to 21 score 0.0 and are the newest four
        assert self.victim(EpiKV(), (0.5, 0.1, 0.0, *self.Z[3:])) == 12

    def test_below_the_budget_nobody_goes(self) -> None:
        assert self.victim(EpiKV(), keep=23) is None

    def test_twins_protect_the_same_tokens(self) -> None:
        assert self.victim(sign_flipped(EpiKV())) == 13
        assert self.CONTEXT <= int(self.victim(shuffled(EpiKV())) or 0) < self.LENGTH - 4


@dataclass(frozen=True)
class EvenKept(SelKV):
    """SelKV that keeps the even tokens, and the last eight."""

    def choose(self, layer: LayerView, score: Tensor, tokens: int) -> Chosen:
        at = torch.arange(layer.tokens)
        kept = (at % 2 == 0) | (at >= layer.tokens - 8)
        return Chosen(kept, kept.expand(layer.kv_heads, -1))


class TestSelKV:
    """arXiv 2607.16213."""

    def decided(self, policy: SelKV, data: LayerData, q: Tensor, tokens: int = 14):  # type: ignore[no-untyped-def]
        seen = shown(policy, data, q)
        scores = {0: policy.score(seen, memory())}
        return policy.decide(cache(seen), scores, memory(), allowance(tokens, SELKV_TOKENS))

    def test_union_and_trim_by_hand(self) -> None:
        """Eight tokens, four kept, two of them the newest: each head's best two, united, the best two by mean score."""
        score = torch.tensor([[9.0, 8, 1, 0, 2, 0, 9, 9], [0.0, 5, 7, 6, 1, 0, 9, 9]])
        seen = view(SelKV(recent=2), dense(8), queries=random_q(8))
        kept, own = SelKV(recent=2).choose(seen, score, 4)
        assert kept.nonzero().flatten().tolist() == [0, 1, 6, 7]  # means: 4.5, 6.5, 4.0, 3.0
        assert [row.nonzero().flatten().tolist() for row in own] == [[0, 1, 6, 7], [6, 7]]

    def test_alike_values_merge_whole_and_change_nothing(self) -> None:
        data = dense(SELKV_TOKENS)
        v = torch.ones(KV_HEADS, SELKV_TOKENS, 1) * torch.arange(1.0, DIM + 1).double()
        decision = self.decided(POLICY, LayerData.dense(data.k, v), random_q(SELKV_TOKENS))
        merge = decision.edits[0][0]
        assert isinstance(merge, Merge) and decision.facts["gate_mean"] == pytest.approx(1.0)
        for head in range(KV_HEADS):
            for target in merge.into[head].unique().tolist()[1:]:
                sources = [target, *(merge.into[head] == target).nonzero().flatten().tolist()]
                weight = merge.weight[head, sources]
                torch.testing.assert_close((weight / weight.sum()) @ v[head, sources], v[head, target])

    def test_orthogonal_values_are_gated_to_nothing_and_the_bias_is_0(self) -> None:
        data = dense(SELKV_TOKENS)
        v = torch.eye(DIM).double()[torch.arange(SELKV_TOKENS) % SIZE].expand(KV_HEADS, -1, -1)
        decision = self.decided(POLICY, LayerData.dense(data.k, v), random_q(SELKV_TOKENS))
        assert [type(edit) for edit in decision.edits[0]] == [Bias, Evict]
        assert bool((decision.edits[0][0].log_weight == 0).all())
        assert decision.facts["gate_mean"] == 0 and decision.facts["routed_share"] > 0

    def test_with_alpha_1_copies_that_are_merged_answer_as_the_full_cache(self) -> None:
        """Keys and values in pairs, one of each kept; every window query sees both, so the ratio is the true one: 2."""
        data = dense(SELKV_TOKENS)
        at = torch.arange(SELKV_TOKENS)
        source = torch.where(at < SELKV_TOKENS - 8, at - at % 2, at)
        k = torch.nn.functional.normalize(data.k, dim=-1)[:, source]
        full = LayerData.dense(k, data.v[:, source])
        q = 20 * k.repeat_interleave(Q_HEADS // KV_HEADS, 0)  # a token attends to its own copy most
        merge, bias, evict = self.decided(EvenKept(window=8, recent=4, alpha=1.0), full, q, 24).edits[0]
        odd = (at % 2 == 1) & (at < SELKV_TOKENS - 8)
        assert torch.equal(merge.into, torch.where(odd, at - 1, -1).expand(KV_HEADS, -1))
        twice = torch.where((at % 2 == 0) & (at < SELKV_TOKENS - 8), math.log(2), 0.0)
        torch.testing.assert_close(bias.log_weight, twice.double().expand(KV_HEADS, -1))
        future = random_q(5, seed=9)
        for head in range(Q_HEADS):
            of = head // (Q_HEADS // KV_HEADS)
            logits = future[head] @ k[of].T * DIM**-0.5
            dense_out = logits.softmax(-1) @ full.v[of]
            left = evict.keep
            short = (logits + bias.log_weight[of])[:, left].softmax(-1) @ full.v[of, left]
            torch.testing.assert_close(short, dense_out)

    def test_where_no_bucket_holds_a_kept_token_it_is_eviction(self) -> None:
        """The last bucket is kept whole, nothing else: no evicted token has a kept one before it in its bucket."""

        @dataclass(frozen=True)
        class LastBucket(SelKV):
            def choose(self, layer: LayerView, score: Tensor, tokens: int) -> Chosen:
                kept = torch.arange(layer.tokens) >= layer.tokens - SIZE
                return Chosen(kept, kept.expand(layer.kv_heads, -1))

        decision = self.decided(LastBucket(window=8, recent=4), dense(SELKV_TOKENS), random_q(SELKV_TOKENS), SIZE)
        assert decision.facts["routed_share"] == 0 and decision.facts["position_0_kept"] == 0
        assert [type(edit) for edit in decision.edits[0]] == [Bias, Evict]


class TestKara:
    """arXiv 2607.01237."""

    def test_a_window_keeps_its_share_rounded_up(self) -> None:
        kept = [
            Kara(interval=width).kept(Allowance(Budget("per_window", share), 0, 0, NONE))
            for width, share in ((256, 0.5), (256, 0.3), (1024, 0.4), (1024, 0.3))
        ]
        assert kept == [128, 77, 410, 308]

    def test_gaps_side_by_side_make_chunks_longer_than_one_gap_may(self) -> None:
        importance = torch.tensor([0.1, 9.0, 0.2, 8.0, 0.1, 0.1, 7.0, 0.3])
        assert token2chunk(importance, 6, share=0.5, longest=4).nonzero().flatten().tolist() == [1, 2, 3, 4, 5, 6]

    def test_half_of_a_window_of_256_gives_back_8_of_16_blocks_once_packed_and_none_before(self) -> None:
        keep = torch.ones(2, 512 + 256, dtype=torch.bool)
        window = token2chunk(torch.rand(256, generator=torch.Generator().manual_seed(0)), 128, share=0.5, longest=16)
        keep[:, 512:] = window
        freed = count({0: keep.numpy()}, [GroupSpec(0, (0,), (2,), 16)])
        assert freed["compaction"].blocks == 8 and freed["whole_block"].blocks == 0


class TestLocks:
    """arXiv 2607.24555."""

    def test_what_is_not_read_changes_the_output_by_its_share_times_the_difference_of_means(self) -> None:
        """(1 - coverage) x (mean value of what is dropped - mean value of what is kept), means by attention."""
        data, q, policy = dense(12 * 16 + 7), random_q(1), Locks(rank=4)
        blocks = [x[:, : 12 * 16].unflatten(1, (12, 16)).transpose(0, 1) for x in (data.k, data.v)]
        side = policy.summarize(BlockView(view(policy, data).layer, *blocks))
        seen = view(policy, data, side=side, block_size=16)
        chosen = policy.read(seen, q, memory(), allowance(5 * 16, seen.length, unit="read_tokens"), None)
        assert chosen is not None
        read = chosen.mask(seen.slots, Q_HEADS)[0].numpy()
        for head in range(Q_HEADS):
            of = head // (Q_HEADS // KV_HEADS)
            logits = (q[head, 0] @ data.k[of].T * seen.layer.scale).numpy()
            weight, v, kept = np.exp(logits - logits.max()), data.v[of].numpy(), read[head]
            assert kept.sum() == 4 * 16 + 7

            def mean(of_them: np.ndarray, weight: np.ndarray = weight, v: np.ndarray = v) -> np.ndarray:
                return (weight[of_them] @ v[of_them]) / weight[of_them].sum()

            everything, coverage = mean(np.ones_like(kept)), weight[kept].sum() / weight.sum()
            moved = (1 - coverage) * (mean(~kept) - mean(kept))
            np.testing.assert_allclose(everything - mean(kept), moved, atol=1e-12)
            assert 0 < coverage < 1


class TestDynaCalKV:
    """arXiv 2607.24331, table I: hidden size, KV heads, head dimension; ranks of all layers together; parameters."""

    @pytest.mark.parametrize(
        "hidden, heads, dim, rank, parameters",
        [
            (2048, 8, 64, 1568, 3_612_672),  # Llama-3.2-1B
            (2048, 16, 128, 11_712, 29_982_720),  # Qwen1.5-1.8B
            (2048, 32, 64, 14_752, 33_988_608),  # SmolLM2-1.7B
        ],
    )
    def test_uniform_groups_of_four_have_the_published_parameters_and_are_the_ceiling(
        self, hidden: int, heads: int, dim: int, rank: int, parameters: int
    ) -> None:
        def thin(ranks: list[int], sizes: list[int]) -> float:
            """Parameters of thin projections: each group's rank times the inputs and its heads' outputs."""
            return sum(r * (hidden + size * dim) for r, size in zip(ranks, sizes, strict=True))

        groups = heads // 4
        assert rank % 32 == 0 and thin([rank // groups] * groups, [4] * groups) == parameters
        layer_rank = 4 * heads
        limit = thin([layer_rank // groups] * groups, [4] * groups)
        flat = [1.0] * (heads * dim)
        rng = torch.Generator().manual_seed(heads)
        for sizes in ([heads], [1] * heads, [heads - 3, 2, 1]):
            spectra = [(torch.rand(size * dim, generator=rng).sort(descending=True).values).tolist() for size in sizes]
            ranks = DynaCalKV()._ranks(spectra, sizes, layer_rank)
            assert thin(ranks, sizes) <= limit and sum(ranks) <= layer_rank
        assert DynaCalKV()._ranks([flat], [heads], layer_rank) == [4 * layer_rank // heads]
        alone = DynaCalKV()._ranks([flat[:dim]] * heads, [1] * heads, layer_rank)
        assert alone == [layer_rank // heads] * heads  # single heads never meet the ceiling
