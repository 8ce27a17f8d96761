"""Positions after eviction: true ones, whoever left and however the prompt was cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvassay.cache.ledger import Ledger
from kvassay.cache.ops import GroupSpec
from kvassay.cache.rope import rotate
from kvassay.layout.model import Rope

ROPE = Rope(10_000.0, 8)


def ledger_of(tokens: int, window: int | None = None) -> tuple[Ledger, int]:
    ledger = Ledger([GroupSpec(0, (0,), (1,), 4, window=window)], 100)
    seq, _ = ledger.create(range(tokens))
    ledger.append(seq, range(tokens))
    return ledger, seq


def test_survivors_of_an_interior_eviction_keep_their_positions() -> None:
    """rajveer43/VeloxQuant-MLX PR #137 to #139, NVIDIA/kvpress #16, huggingface/transformers #35350, vllm PR #43374:
    keys are held as rotated; renumbering what survives, or the next token, parts them from their rotation."""
    ledger, seq = ledger_of(12)
    ledger.evict_positions(seq, 0, np.array([3, 4, 7]))
    ledger.append(seq, [99])
    assert ledger.slots(seq, 0).positions.tolist() == [[0, 1, 2, 5, 6, 8, 9, 10, 11, 12]]


def test_the_length_is_that_of_the_text_not_of_what_is_kept() -> None:
    """rajveer43/VeloxQuant-MLX PR #196, #188, #200: the offset was the number of rows kept, pinned at the budget, so
    every later query was rotated to one place."""
    ledger, seq = ledger_of(20)
    for step in range(20, 40):
        oldest = ledger.slots(seq, 0).positions[0, 0]
        ledger.evict_positions(seq, 0, np.array([oldest]))
        ledger.append(seq, [step])
        assert ledger.length(seq) == step + 1
        assert ledger.slots(seq, 0).counts.tolist() == [20]


@pytest.mark.parametrize(("prompt", "chunk"), [(300, 128), (300, 300), (128, 32), (129, 32)])
def test_partial_chunks_leave_the_same_rows(prompt: int, chunk: int) -> None:
    """awslabs/keys_values #140: writes that fill a chunk in part left other rows than whole ones (300 tokens in
    chunks of 128, the last of 44; 128 in chunks of 32)."""
    ledger = Ledger([GroupSpec(0, (0,), (1,), 4)], 200)
    seq, _ = ledger.create(range(prompt))
    for first in range(0, prompt, chunk):
        ledger.append(seq, range(first, min(first + chunk, prompt)))
        old = max(0, ledger.length(seq) - 128)
        gone = ledger.slots(seq, 0).positions[0]
        ledger.evict_positions(seq, 0, gone[gone < old])
    assert ledger.slots(seq, 0).positions.tolist() == [list(range(max(0, prompt - 128), prompt))]


def attention(q: Tensor, k: Tensor, positions: Tensor, at: int) -> Tensor:
    turned = rotate(k, positions[None], ROPE)
    asked = rotate(q, torch.tensor([[at]]), ROPE)
    return torch.softmax(asked @ turned.transpose(1, 2), -1)


def test_true_positions_and_a_dense_run_over_the_kept_suffix_agree() -> None:
    """awslabs/keys_values #140: rotation is relative, so both must agree (1e-6); they differed by 0.19 to 0.22."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, n, 8, generator=generator, dtype=torch.float64) for n in (1, 128))
    true = attention(q, k, torch.arange(172, 300), 300)
    suffix = attention(q, k, torch.arange(128), 128)
    torch.testing.assert_close(true, suffix, atol=1e-6, rtol=0)
    mixed = torch.cat([torch.arange(64), torch.arange(236, 300)])  # what the fault did: two counts in one cache
    assert (attention(q, k, mixed, 300) - true).abs().max() > 1e-3
