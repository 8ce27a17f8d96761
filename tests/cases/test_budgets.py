"""Budgets that leave nothing or mean something else than they say, and bytes counted by the wrong heads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvassay.cache.ledger import Ledger
from kvassay.cache.ops import GroupSpec
from kvassay.errors import BudgetError, PolicyError
from kvassay.layout.bytes import bytes_at, bytes_per_token
from kvassay.layout.config import from_config
from kvassay.layout.model import Component, Latent, Layer, Layout
from kvassay.policy import registry
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.card import Effect, When
from tests.layout.configs import PUBLISHED
from tests.policy.build import dense, kept, random_q, view

GIB, MIB = 2**30, 2**20


def test_two_evictions_in_a_row_remove_sixty_percent_not_ten() -> None:
    """NVIDIA/kvpress #146: shares removed of 0.5 and then 0.2 were reported as their product, 0.10."""
    ledger = Ledger([GroupSpec(0, (0,), (1,), 4)], 40)
    seq, _ = ledger.create(range(100))
    ledger.append(seq, range(100))
    ledger.evict_positions(seq, 0, np.arange(50))
    ledger.evict_positions(seq, 0, np.arange(50, 60))
    assert ledger.slots(seq, 0).counts.tolist() == [round(100 * (1 - 0.5) * (1 - 0.2))]


@given(st.integers(0, 60), st.floats(0.01, 0.99))
def test_a_budget_keeps_at_least_one_token_or_is_refused(context: int, fraction: float) -> None:
    """NVIDIA/kvpress PR #264, PR #277, PR #165: `int(len * (1 - ratio))` was 0 for one or two tokens, or none at all,
    and attention over no key gave NaN without an error."""
    try:
        assert 1 <= Budget("keep_tokens", fraction).tokens(context) <= context
    except BudgetError as error:
        assert f"of {context} tokens leaves none" in str(error)


def test_no_recent_tokens_does_not_mean_all_of_them() -> None:
    """NVIDIA/kvpress PR #277: with a window of 0 tokens `scores[..., -0:]` protected every token, and `topk(0)` none
    stayed; a context of 8 at a ratio of 0.95 emptied the cache."""
    policy = registry.make("knorm")
    shown = view(policy, dense(8), sink=0, recent=0)
    assert [len(row) for row in kept(policy, shown, 2)] == [2, 2]
    with pytest.raises(BudgetError, match="of 8 tokens leaves none"):
        Allowance.resolve(Budget.parse("keep=0.05"), 8, Protection(0, 0))


def test_a_window_that_leaves_nothing_to_choose_is_refused() -> None:
    """NVIDIA/kvpress #134: 15 tokens, a window of 64: nothing was left to score and the answer went in circles."""
    policy = registry.make("snapkv")
    with pytest.raises(BudgetError, match="always keeps window=64 tokens, the budget is 7 of 15: nothing is left"):
        kept(policy, view(policy, dense(15), queries=random_q(15)), 7)
    with pytest.raises(BudgetError, match="7 of 15 tokens, not more than the 36 protected"):
        Allowance.resolve(Budget.parse("keep=0.5"), 15, Protection(4, 32))


def test_an_absolute_budget_is_the_same_at_any_length() -> None:
    """NVIDIA/kvpress #102: users asked for tokens, not only for a ratio of the prefill."""
    assert [Budget.parse("keep=512").tokens(context) for context in (600, 4096, 10**6)] == [512] * 3


def test_keys_are_counted_by_kv_heads() -> None:
    """FasterDecoding/SnapKV #16 and #29, SalesforceAIResearch/ThinK #4, FYYFU/HeadKV #3, KVCache-Factory #49,
    torchtune #38, FlexKV PR #67: keys repeated to 32 query heads before they were pruned or allocated. Llama-3-8B,
    2,048 tokens: 0.25 GiB by 8 KV heads; by query heads 1 GiB, and a ratio of 4 saves nothing."""
    layout = from_config(PUBLISHED["llama-3.1-8b"])
    assert bytes_at(layout, 2048).total == 0.25 * GIB
    assert {layer.group_size for layer in layout.layers} == {4}


def test_a_hybrid_of_60_layers_is_not_sized_as_60_full_ones() -> None:
    """tenstorrent/tt-xla #5727, tt-metal PR #45184, tenstorrent/vllm #202: 50 layers with a window of 1,024 and 10
    global ones were sized as 60 global ones; 7,584 tokens."""
    layout = from_config(PUBLISHED["gemma-4-31b"])
    local, full = 2 * 16 * (256 + 256), 2 * 4 * (512 + 512)
    count = bytes_at(layout, 7584)
    assert (count.sliding, count.full) == (50 * 1024 * local, 10 * 7584 * full)
    everywhere = bytes_at(layout, 7584, hybrid_manager=False)
    assert everywhere.total == 7584 * (50 * local + 10 * full)


def test_windows_cap_what_gpt_oss_holds_only_under_a_hybrid_manager() -> None:
    """hf-mem PR #70: gpt-oss-20b, 8,192 tokens, batch 32, bf16: 6.09 GiB with windows, 12.00 GiB reserved without."""
    layout = from_config(PUBLISHED["gpt-oss-20b"])
    assert bytes_at(layout, 8192).total * 32 == 6.09375 * GIB
    assert bytes_at(layout, 8192, hybrid_manager=False).total * 32 == 12 * GIB


def test_a_latent_is_not_charged_as_expanded_keys_and_values() -> None:
    """higgs PR #254, imp PR #803, omlx PR #2626, DeepSeek-R1 #238: 27 layers of 512 + 64 elements are 31,104 bytes a
    token; the 16 heads of 192 and 128 that they expand to would be 276,480."""
    layers = [Layer(i, 16, (Component(Latent(512, 64)),), scale=1.0) for i in range(27)]
    layout = Layout("deepseek_v2", tuple(layers), 2048, 102_400, 163_840)
    assert bytes_per_token(layout).latent == 31_104
    assert 27 * 16 * (192 + 128) * 2 == 276_480


@pytest.mark.parametrize("missing", ["r-kv(window=None)", "r-kv(window=)", "snapkv(kernel=None)"])
def test_a_parameter_without_a_value_is_refused_before_the_run(missing: str) -> None:
    """Zefan-Cai/R-KV #8: the shipped script left the window unset, and the run ended in `int - None`."""
    with pytest.raises(PolicyError):
        registry.parse(missing)


def test_who_never_bounds_decoding_says_so() -> None:
    """FasterDecoding/SnapKV #23, mit-han-lab/streaming-llm #48: eviction once per prompt, and the cache grows through
    a long answer. The card names the moments, and only a policy of several of them bounds what is generated."""
    once = frozenset({When.AFTER_PREFILL})
    for name in ("snapkv", "streaming", "h2o", "pyramidkv"):
        card = registry.make(name).card
        assert card.when == once
        assert not card.per_step
    for name in ("r-kv", "paged-eviction"):
        card = registry.make(name).card
        assert Effect.EVICT in card.effects
        assert card.per_step
