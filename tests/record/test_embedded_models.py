"""The two embedded models, for real: fetched into the cache if they are not there."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from kvassay.record.fetch import fetch
from kvassay.record.load import LoadedModel, load
from kvassay.record.models import CATALOGUE
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample

from .conftest import sample_of
from .test_transformers import attention

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# The Apache License, Version 2.0, sections 1 to 3, words both models know well but not by heart.
LICENCE = Path(__file__).parents[2] / "LICENSE"
CONTEXT = 2048


@pytest.fixture(scope="module", params=list(CATALOGUE))
def model(request: pytest.FixtureRequest) -> LoadedModel:
    fetch(request.param)
    return load(request.param)


def text_ids(model: LoadedModel, count: int) -> list[int]:
    ids = model.tokenizer(LICENCE.read_text(encoding="utf-8")).input_ids
    assert len(ids) >= count
    return list(ids[:count])


def test_identity_is_the_manifests(model: LoadedModel) -> None:
    manifest = json.loads((fetch(model.identity.name) / "kvassay.json").read_text())
    entry = CATALOGUE[model.identity.name]
    assert manifest["gguf_sha256"] == entry.sha256
    assert model.identity.weights_sha256 == manifest["weights_sha256"]
    assert model.layout.native_context == entry.native_context
    opening = model.tokenizer("x").input_ids[0] == model.tokenizer.bos_token_id
    assert opening == entry.needs_bos


def test_perplexity_is_that_of_a_sound_conversion(model: LoadedModel) -> None:
    ids = torch.tensor([text_ids(model, 512)])
    with torch.inference_mode():
        logits = model.model(input_ids=ids, use_cache=False).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    assert 1.5 < math.exp(float(loss)) < 30


def test_a_2k_recording_reproduces_every_layers_attention(model: LoadedModel, tmp_path: Path) -> None:
    ids = text_ids(model, CONTEXT + 128)
    sample = sample_of(ids[:CONTEXT], [(ids[CONTEXT : CONTEXT + 8], ids[CONTEXT + 8 :])])
    trace = record_sample(model, sample, tmp_path / "t", RecordOptions(q_tail=64, taps=("output",)))
    (branch,) = trace.branches
    for layer in trace.layout.layers:
        i = layer.index
        for segments in ((trace.prefix,), (trace.prefix, branch)):
            k, v = (torch.cat([part.cache(i, name) for part in segments]) for name in "kv")
            q = torch.cat([part.q(i) for part in segments])
            output = torch.cat([part.tap(f"output_{i:03d}") for part in segments])
            error = (attention(layer, q, k, v) - output).abs().max() / output.abs().max()
            assert error < 1e-5, f"layer {i} ({layer.kind})"
    correct = branch.greedy_ids[:-1] == branch.token_ids[1:]
    assert correct.float().mean() > 0.3  # licence prose is easy; a wrong position or mask gives nearly none
