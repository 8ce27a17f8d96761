from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvassay.layout.config import from_config
from kvassay.record.load import LoadedModel, ModelIdentity
from kvassay.workload.sample import Branch, Sample

from . import tiny


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


def loaded(family: str, seed: int = 1) -> LoadedModel:
    model = tiny.build(family, seed=seed)
    identity = ModelIdentity(f"tiny-{family}", "folder", "0" * 64, "1" * 64)
    return LoadedModel(model, None, from_config(model.config), identity)


def sample_of(context: Sequence[int], branches: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Sample:
    made = tuple(
        Branch(tuple(question), tuple(answer), f"question {i}", f"answer {i}", (0,), 0.25, {"key": i})
        for i, (question, answer) in enumerate(branches)
    )
    return Sample("tiny", 5, 3, tuple(context), made, False, {})


def run_chunks(model: Any, ids: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of a chunked forward with the stock cache."""
    from kvassay.record.calling import cache_keyword, new_cache

    cache, start, rows = new_cache(model), 0, []
    with torch.inference_mode():
        for size in chunks:
            part = torch.tensor([list(ids[start : start + size])])
            result = model(input_ids=part, use_cache=True, **{cache_keyword(model): cache})
            rows.append(result.logits[0])
            start += size
    return torch.cat(rows)
