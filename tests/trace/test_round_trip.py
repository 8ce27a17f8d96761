from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from kvassay.errors import EvidenceMissing, TraceError
from kvassay.layout.model import KV, Component, IndexKeys, Latent, Layer, Layout, Pooled, TopK
from kvassay.trace.reader import Trace
from kvassay.trace.schema import LogitsSpec, PrefixEntry
from kvassay.trace.shapes import expected_shards
from kvassay.trace.verify import verify
from kvassay.trace.writer import TraceWriter

from . import tiny


def stored(trace: Trace, key: tuple[str, int | str, str]) -> torch.Tensor:
    name, where, kind = key
    segment = {s.name: s for s in trace.segments}[name]
    if isinstance(where, int):
        return {"k": segment.k, "v": segment.v, "q": segment.q}[kind](where)
    return segment.logits if where == "logits" else segment.tap(where)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_row_comes_back_bit_exact(tmp_path: Path, dtype: str) -> None:
    made = tiny.make(tmp_path / "trace", dtype=dtype)
    trace = Trace.open(made.path)
    for key, rows in made.rows.items():
        found = stored(trace, key)
        assert found.dtype == rows.dtype, key
        assert torch.equal(found, rows), key
    assert [s.token_ids.tolist() for s in trace.segments] == list(tiny.IDS.values())
    assert trace.layout == tiny.LAYOUT
    assert verify(made.path).problems == []


def test_header_round_trips_and_lists_every_file_with_its_size(made: tiny.Made) -> None:
    trace = Trace.open(made.path)
    assert trace.header.model_copy(update={"shards": {}}) == made.header
    on_disk = {
        str(p.relative_to(made.path)): p.stat().st_size for p in made.path.rglob("*") if p.suffix == ".safetensors"
    }
    assert {name: entry.bytes for name, entry in trace.header.shards.items()} == on_disk
    assert len(on_disk) == 3 * (1 + 3 + 3) + 2  # tokens, layers, taps per segment; logits per branch


def test_shards_are_plain_safetensors(made: tiny.Made) -> None:
    found = load_file(made.path / "branch_000/layer_001.safetensors")
    assert set(found) == {"k", "v", "q"}
    for name, tensor in found.items():
        assert torch.equal(tensor, made.rows["branch_000", 1, name])
    assert load_file(made.path / "prefix/tokens.safetensors")["ids"].dtype == torch.int32


def test_nothing_is_pickled(made: tiny.Made) -> None:
    Trace.open(made.path).reblock(4)
    kinds = {path.suffix for path in made.path.rglob("*") if path.is_file()}
    assert kinds == {".json", ".safetensors", ".parquet"}
    for path in made.path.rglob("*"):
        assert not path.is_file() or not path.read_bytes().startswith((b"\x80\x02", b"\x80\x04", b"\x80\x05", b"PK"))


def test_a_layer_that_reads_another_cache_stores_queries_only(made: tiny.Made) -> None:
    trace = Trace.open(made.path)
    assert list(trace.shapes["prefix/layer_002.safetensors"]) == ["q"]
    assert torch.equal(trace.prefix.k(2), made.rows["prefix", 0, "k"])
    assert torch.equal(trace.prefix.q(2), made.rows["prefix", 2, "q"])


def test_positions_and_query_ranges(made: tiny.Made) -> None:
    trace = Trace.open(made.path)
    branch = trace.branches[0]
    assert (trace.prefix.start, trace.prefix.q_start, branch.start, branch.q_start) == (0, 7, 11, 11)
    assert torch.equal(trace.prefix.q(0, first=9), made.rows["prefix", 0, "q"][2:])
    assert torch.equal(branch.q(0, first=13), made.rows["branch_000", 0, "q"][2:])
    with pytest.raises(EvidenceMissing, match=r"stored from position 7 on, 6 was asked; record with q_from=6"):
        trace.prefix.q(0, first=6)
    assert (branch.question_tokens, branch.answer_text, branch.meta) == (4, "blue\nsky", {"depth": 0.5})


def test_evidence_that_was_not_recorded_says_how_to_record_it(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    header = tiny.header(taps=(), logits=None, q_from=11)
    rows = {
        key: value
        for key, value in tiny.rows_for(torch.float32).items()
        if isinstance(key[1], int) and not (key[0] == "prefix" and key[2] == "q")
    }
    with TraceWriter(path, header) as writer:
        tiny.write_rows(writer, rows)
    trace = Trace.open(path)
    assert not (path / "prefix/layer_002.safetensors").exists()
    with pytest.raises(EvidenceMissing, match=r"stored from position 11 on, 0 was asked; record with q_from=0"):
        trace.prefix.q(1)
    with pytest.raises(EvidenceMissing, match=r"tap 'lse_000' of prefix was not recorded.*recorder's taps"):
        trace.prefix.tap("lse_000")
    with pytest.raises(EvidenceMissing, match="no logits of branch_000 are stored; record with logits kind 'full'"):
        _ = trace.branches[0].logits
    with pytest.raises(EvidenceMissing, match=r"layer 0 \(full\) keeps no 'latent'"):
        trace.prefix.cache(0, "latent")
    with pytest.raises(TraceError, match="layer 3; the layout has layers 0 to 2"):
        trace.prefix.k(3)


def test_topk_logits_keep_the_largest_and_the_log_sum_exp(tmp_path: Path) -> None:
    made = tiny.make(tmp_path / "trace", logits=LogitsSpec(kind="topk", k=3))
    full = made.rows["branch_000", "logits", "logits"]
    branch = Trace.open(made.path).branches[0]
    top = branch.top_logits
    order = full.numpy().argsort(axis=1)[:, ::-1][:, :3]
    assert top.ids.tolist() == order.tolist()
    assert torch.equal(top.values, torch.gather(full, 1, torch.from_numpy(order.copy())))
    torch.testing.assert_close(top.logsumexp.double(), full.double().exp().sum(1).log(), atol=1e-6, rtol=1e-6)
    assert branch.greedy_ids.tolist() == full.argmax(1).tolist()
    with pytest.raises(EvidenceMissing, match="topk logits of branch_000 are stored; record with logits kind 'full'"):
        _ = branch.logits


def test_mapped_rows_do_not_load_the_shard_and_never_change_the_file(tmp_path: Path) -> None:
    tokens, heads, dim = 40_000, 8, 64
    layout = Layout("tiny", (Layer(0, heads, (Component(KV(heads, dim, dim)),), 1.0),), 8, 50, tokens)
    header = tiny.header(
        layout=layout, prefix=PrefixEntry(tokens=tokens), branches=(), taps=(), logits=None, q_from=tokens
    )
    path = tmp_path / "trace"
    before = psutil.Process().memory_info().rss
    with TraceWriter(path, header) as writer:
        segment = writer.segment("prefix")
        for first in range(0, tokens, 500):
            segment.append_tokens([1] * 500)
            for name in ("k", "v"):
                segment.append(0, name, torch.full((500, heads, dim), float(first)))
    shard = tokens * heads * dim * 4 * 2
    assert shard > 160e6
    assert psutil.Process().memory_info().rss - before < shard / 4  # written in bounded memory

    trace = Trace.open(path)
    before = psutil.Process().memory_info().rss
    part = trace.prefix.k(0)[20_000:20_010]
    assert part.unique().tolist() == [20_000.0]
    assert psutil.Process().memory_info().rss - before < shard / 4  # 5 MiB a page cluster, not 160 MB
    assert any(m.path.endswith("layer_000.safetensors") for m in psutil.Process().memory_maps())

    part.fill_(7)
    assert Trace.open(path).prefix.k(0)[20_000].unique().tolist() == [20_000.0]


def test_a_branch_can_be_declared_once_its_length_is_known(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    rows = tiny.rows_for(torch.float32)
    with TraceWriter(path, tiny.header(branches=())) as writer:
        for entry in tiny.header().branches:
            writer.add_branch(entry)
        tiny.write_rows(writer, rows)
    trace = Trace.open(path)
    assert trace.header.branches == tiny.header().branches
    assert torch.equal(trace.branches[1].v(1), rows["branch_001", 1, "v"])


def test_float32_rows_are_rounded_to_a_float16_trace_unless_they_overflow(tmp_path: Path) -> None:
    rows = tiny.rows_for(torch.float32)
    with TraceWriter(tmp_path / "trace", tiny.header(dtype="float16")) as writer:
        tiny.write_rows(writer, rows)
    assert torch.equal(Trace.open(tmp_path / "trace").prefix.k(0), rows["prefix", 0, "k"].half())
    with (
        pytest.raises(TraceError, match=r"layer_000.safetensors 'k': a value of 70000 does not fit into torch.float16"),
        TraceWriter(tmp_path / "big", tiny.header(dtype="float16")) as writer,
    ):
        writer.segment("prefix").append(0, "k", torch.full((1, 2, 4), 7e4))


def test_shapes_of_latent_index_and_pooled_storage() -> None:
    layout = Layout(
        "tiny",
        (
            Layer(0, 5, (Component(Latent(12, 4), TopK(3), IndexKeys(6, q_heads=2, weighted=True)),), 1.0),
            Layer(1, 5, (Component(KV(1, 8, 8)), Component(Pooled(4, 10), index=IndexKeys(3))), 1.0),
        ),
        16,
        50,
        64,
    )
    shards = expected_shards(tiny.header(layout=layout, taps=(), logits=None))
    shapes = {path: {n: s.shape for n, s in specs.items()} for path, specs in shards.items()}
    assert shapes["prefix/layer_000.safetensors"] == {
        "latent": (11, 1, 16),
        "index_keys": (11, 6),
        "index_queries": (4, 2, 6),
        "index_weights": (4, 2),
        "selection": (4, 1, 3),
        "q": (4, 5, 16),
    }
    # 11 tokens fill 2 entries of 4; the branch's 6 more make 17 tokens, 4 entries: 2 of its own
    assert shapes["prefix/layer_001.safetensors"]["pooled"] == (2, 10)
    assert shapes["branch_000/layer_001.safetensors"]["pooled"] == (2, 10)
    assert shapes["branch_000/layer_001.safetensors"]["index_keys"] == (2, 3)
    # the other branch ends at 14 tokens, 3 entries
    assert shapes["branch_001/layer_001.safetensors"]["pooled"] == (1, 10)


def test_the_header_is_readable_json_with_the_schema_version_first(made: tiny.Made) -> None:
    data = json.loads((made.path / "trace.json").read_text())
    assert next(iter(data)) == "schema_version"
    assert data["schema_version"] == 1
    assert made.path.stat().st_mode & 0o077 == 0o777 & ~_umask() & 0o077


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
