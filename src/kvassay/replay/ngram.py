"""Prompt lookup: a drafter without a model, which repeats what followed the same tokens before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def prompt_lookup(tokens: Sequence[int], k: int, shortest: int, longest: int) -> list[int]:
    """Up to `k` tokens that followed the earliest occurrence of the longest matching end of `tokens`.

    The end must be `shortest` to `longest` tokens long and occur before; where fewer than `k` tokens follow, those
    are proposed, and where nothing matches none. The rule of `vllm.v1.spec_decode.ngram_proposer`.
    """
    text = np.asarray(tokens, dtype=np.int64)
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
        found = np.flatnonzero((windows == text[-size:]).all(axis=1))
        if found.size:
            first = int(found[0]) + size
            return text[first : first + k].tolist()
    return []
