"""Every workload on the two embedded models: dense attention must be above the floor on each."""

from __future__ import annotations

import copy
from statistics import mean
from typing import Any

import pytest
import torch

from kvassay.record.calling import cache_keyword, new_cache
from kvassay.record.fetch import fetch
from kvassay.record.load import LoadedModel, load
from kvassay.workload.floor import FLOORS, check_floor
from kvassay.workload.registry import build
from kvassay.workload.sample import Sample

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
MODELS = ("smollm2-135m", "gemma-3-270m")
GENERATED = ("scratchpad", "needle_generated")
"""Most of their text is an answer, fed as such: their context may be short."""
WORKLOADS: list[tuple[str, int, dict[str, Any]]] = [
    *((name, 2048, {}) for name in FLOORS if name not in (*GENERATED, "jsonl")),
    *((name, 512, {"generated": 768}) for name in GENERATED),
]
"""Imported texts have no length of their own."""
CONTEXTS = 2


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    fetch(request.param)
    return load(request.param)


@torch.inference_mode()
def answers(loaded: LoadedModel, sample: Sample) -> list[tuple[float, float]]:
    """(top-1 share, mean NLL) of the scored tokens of each branch: one prefill, each branch from a copy."""
    model, keyword = loaded.model, cache_keyword(loaded.model)
    cache = new_cache(model)
    for start in range(0, len(sample.context_ids), 512):
        part = torch.tensor([sample.context_ids[start : start + 512]])
        model(input_ids=part, use_cache=True, logits_to_keep=1, **{keyword: cache})
    rows = []
    for branch in sample.branches:
        ids = torch.tensor([branch.token_ids])
        logits = model(input_ids=ids, use_cache=True, **{keyword: copy.deepcopy(cache)}).logits[0]
        predicted = logits[len(branch.question_ids) - 1 : -1].float().log_softmax(-1)[list(branch.scored)]
        wanted = torch.tensor(branch.answer_ids)[list(branch.scored)]
        top1 = (predicted.argmax(-1) == wanted).float().mean().item()
        rows.append((top1, -predicted.gather(1, wanted[:, None]).mean().item()))
    return rows


@pytest.mark.parametrize(("name", "length", "params"), WORKLOADS, ids=[name for name, *_ in WORKLOADS])
def test_dense_is_above_the_floor(name: str, length: int, params: dict[str, Any], loaded: LoadedModel) -> None:
    samples = [build(name, loaded.tokenizer, length, index=index, **params) for index in range(CONTEXTS)]
    rows = [row for sample in samples for row in answers(loaded, sample)]
    top1, nll = mean(row[0] for row in rows), mean(row[1] for row in rows)
    print(f"{loaded.identity.name} {name} {length}: top-1 {top1:.3f} NLL {nll:.3f} n={len(rows)}")
    check_floor(name, length, top1, nll, model=loaded.identity.name)


def test_both_tokenizers_are_framed_as_they_want(loaded: LoadedModel) -> None:
    sample = build("needle_multikey", loaded.tokenizer, 1024)
    expected = {"smollm2-135m": [], "gemma-3-270m": [2]}[loaded.identity.name]
    assert sample.meta["prefix_ids"] == expected
    assert sample.meta["canonical"] is True


@pytest.mark.parametrize("length", [1024, 4096, 8000])
def test_every_text_is_exact_and_canonical(length: int, loaded: LoadedModel) -> None:
    for name, _, params in WORKLOADS:
        sample = build(name, loaded.tokenizer, length, index=1, **params)
        assert len(sample.context_ids) == length
        assert sample.meta["canonical"] is True, name
