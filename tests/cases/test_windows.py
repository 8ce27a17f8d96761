"""Sliding windows: who is visible at which step, and which block must stay."""

from __future__ import annotations

import pytest

from kvassay.cache.ledger import Ledger
from kvassay.cache.ops import GroupSpec
from kvassay.layout.config import from_config
from tests.layout.configs import PUBLISHED


def sliding(window: int, block_size: int, tokens: int) -> tuple[Ledger, int]:
    ledger = Ledger([GroupSpec(0, (0,), (1,), block_size, window=window)], 400)
    seq, _ = ledger.create(range(tokens))
    ledger.append(seq, range(tokens))
    return ledger, seq


def test_the_window_is_full_at_its_length_and_then_moves() -> None:
    """huggingface/transformers #37574: window 8, prompt of 6, then single steps. After the second the cache is exactly
    full, after the third it has moved by one; the fault came at the step where the length reaches the window."""
    ledger, seq = sliding(8, 4, 6)
    seen = []
    for token in range(6, 10):
        ledger.append(seq, [token])
        seen.append(ledger.slots(seq, 0).positions[0].tolist())
    assert seen == [list(range(7)), list(range(8)), list(range(1, 9)), list(range(2, 10))]


def test_length_is_not_read_off_a_local_layer() -> None:
    """huggingface/transformers PR #38156: the first layer is local, and its window was taken for the length."""
    ledger = Ledger([GroupSpec(0, (0,), (1,), 4, window=8), GroupSpec(1, (1,), (1,), 4)], 100)
    seq, _ = ledger.create(range(30))
    ledger.append(seq, range(30))
    ledger.append(seq, [30])
    assert ledger.length(seq) == 31
    assert [ledger.slots(seq, layer).positions[0, -1] for layer in (0, 1)] == [30, 30]
    assert ledger.slots(seq, 1).counts.tolist() == [31]


@pytest.mark.parametrize(("window", "block_size"), [(64, 16), (127, 64), (5, 4)])
def test_every_visible_token_has_its_block_at_any_length(window: int, block_size: int) -> None:
    """kekzl/imp PR #967: the host kept ceil(window / block) blocks from the tail, the kernel read from
    floor((length - window) / block), one block apart where the length is not whole blocks. sgl-project/sglang
    PR #34870: window 127, page 64: 64 tokens were left alive."""
    ledger, seq = sliding(window, block_size, 1)
    for length in range(2, 3 * window):
        ledger.append(seq, [length])
        table = ledger.table(seq, 0)
        oldest = max(0, length - window)
        assert all(table[oldest // block_size :])
        assert not any(table[: oldest // block_size])
        assert ledger.slots(seq, 0).counts.tolist() == [min(length, window)]


def test_a_window_is_that_of_its_layer_not_of_its_group() -> None:
    """vllm PR #51756, lmdeploy PR #3772, huggingface/transformers PR #40039: one window for all layers, and Gemma 3's
    global layers lost everything beyond it."""
    layout = from_config(PUBLISHED["gemma-3-270m"])
    assert [layer.index for layer in layout.layers if layer.window is None] == [5, 11, 17]
    assert {layer.window for layer in layout.layers} == {512, None}
