from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvassay.errors import RecordError
from kvassay.record.again import rerecord
from kvassay.record.load import load
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.trace.reader import Trace
from kvassay.workload.registry import build

from . import tiny
from .conftest import loaded, sample_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "bytes")


def record(folder: Path, out: Path) -> Trace:
    model = load(folder)
    sample = build("kv_short", model.tokenizer, 1500, seed=4, index=2, questions=2, query_aware=True)
    options = RecordOptions(prefill_chunk=256, q_tail=9, taps=("lse",), tap_layers=(1,), logits_k=7)
    return record_sample(model, sample, out, options)


def test_a_recipe_gives_the_same_trace_again(folder: Path, tmp_path: Path) -> None:
    first = record(folder, tmp_path / "first")
    again = rerecord(first.header, tmp_path / "again", model=folder)
    assert again.header.model_copy(update={"created": first.header.created}) == first.header
    assert len(again.header.shards) > 10  # equal headers: every shard has the same sha256
    assert first.header.recipe.query_aware
    assert first.header.recipe.params["questions"] == 2


def test_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    first = record(folder, tmp_path / "first")
    other = tiny.save(tmp_path / "other")
    weights = load(other).model
    with torch.no_grad():
        weights.lm_head.weight[0, 0] += 1
    weights.save_pretrained(other)
    with pytest.raises(RecordError, match="bytes: weights_sha256 is now"):
        rerecord(first.header, tmp_path / "again", model=other)


def test_a_text_without_recipe_is_refused(tmp_path: Path) -> None:
    sample = sample_of(tiny.token_ids(20), [([1], [2])])
    trace = record_sample(loaded("llama"), sample, tmp_path / "t")
    with pytest.raises(RecordError, match="holds no recipe"):
        rerecord(trace.header, tmp_path / "again")


def test_a_trace_beyond_the_native_context_can_be_made_again(tmp_path: Path) -> None:
    short = tiny.save(tmp_path / "short", native=1024)
    model = load(short)
    sample = build("kv_short", model.tokenizer, 1200)
    first = record_sample(model, sample, tmp_path / "first", RecordOptions(allow_beyond_native=True))
    assert rerecord(first.header, tmp_path / "again", model=short).header.shards == first.header.shards
