"""The registry: every model's bytes to the byte, the traps by name, refusals, and names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvassay.errors import LayoutError, UnsupportedModel
from kvassay.layout.bytes import ByteCount, bytes_at, bytes_per_token
from kvassay.layout.config import from_config
from kvassay.layout.formats import index_bytes, state_bytes
from kvassay.layout.model import KV, IndexKeys, Latent, Pooled, TopK
from kvassay.layout.registry import listing, rows
from kvassay.layout.render import inspect_report
from tests.layout.configs import ADMITTED, REFUSED
from tests.layout.registry_facts import FACTS

PAGE = Path(__file__).parents[2] / "docs" / "registry.md"
CONTEXTS = (131_072, 262_144, 500_000, 1_048_576)


def test_which_models_there_are() -> None:
    assert set(ADMITTED) == set(FACTS) and len(FACTS) == 30
    assert set(REFUSED) == {
        "inkling", "kimi-k3", "lfm2.5-16layer", "nemotron-3-nano-30b-a3b", "nemotron-3-ultra-550b-a55b", "qwen3.6-27b",
        "qwen3.6-35b-a3b",
    }  # fmt: skip


@pytest.mark.parametrize("name", FACTS)
def test_bytes(name: str) -> None:
    layout, facts = from_config(name), FACTS[name]
    growth = bytes_per_token(layout)
    assert (growth.full, growth.latent + growth.pooled, growth.index, growth.sliding) == facts[:4]
    held = [bytes_at(layout, context) for context in CONTEXTS]
    assert tuple(count.total for count in held) == facts.totals
    assert {count.sliding for count in held} == {facts.cap}
    assert bytes_at(layout, CONTEXTS[-1], hybrid_manager=False).total == facts.unbounded
    assert (layout.native_context, len(layout.storing)) == (facts.native, facts.storing)


@pytest.mark.parametrize("name", FACTS)
def test_what_lies_beyond_the_native_context_is_marked(name: str) -> None:
    report = inspect_report(from_config(name), name, CONTEXTS, row=rows.row(name))
    marks = [row["beyond_native_context"] for row in report["contexts"]]
    assert marks == [context > FACTS[name].native for context in CONTEXTS]
    assert report["registry"]["context"]["native"] == FACTS[name].native


def test_trap_gemma_4_heads_differ_by_layer_and_tied_keys_are_cached_twice() -> None:
    big, e2b, unified = from_config("gemma-4-31b"), from_config("gemma-4-e2b"), from_config("gemma-4-12b")
    assert (big.layers[0].kv, big.layers[5].kv) == (KV(16, 256, 256), KV(4, 512, 512))
    assert unified.layers[5].kv == KV(1, 512, 512)
    # K equals V in weights only: both halves count
    assert bytes_per_token(big).full == 10 * 4 * (512 + 512) * 2
    assert [layer.index for layer in e2b.storing] == list(range(15)) and e2b.layers[34].cache_of == 14


def test_trap_mimo_key_and_value_dims() -> None:
    for name in ("mimo-v2.5", "mimo-v2-flash"):
        layout = from_config(name)
        assert (layout.layers[0].kv, layout.layers[1].kv) == (KV(4, 192, 128), KV(8, 192, 128))
        assert {layer.window for layer in layout.layers} == {None, 128}


def test_trap_mla_keeps_one_vector_whatever_the_heads() -> None:
    for name, latent in (
        ("deepseek-v3.2", Latent(512, 64)),
        ("glm-5.2", Latent(512, 64)),
        ("mistral-small-4", Latent(256, 64)),
    ):
        layout = from_config(name)
        assert {layer.components[0].storage for layer in layout.layers} == {latent}
        assert bytes_per_token(layout).latent == len(layout.layers) * (latent.dim + 64) * 2


def test_trap_glm_index_keys_on_21_layers() -> None:
    layout = from_config("glm-5.2")
    keyed = [
        layer.index for layer in layout.layers if layer.components[0].index == IndexKeys(128, q_heads=32, weighted=True)
    ]
    assert keyed == [0, 1, 2, *range(6, 75, 4)] and len(keyed) == 21
    assert {layer.components[0].visibility for layer in layout.layers} == {TopK(2048)}


def test_trap_v4_flash_keeps_four_caches() -> None:
    held = bytes_at(from_config("deepseek-v4-flash"), 131_072)
    assert held == ByteCount(
        sliding=43 * 128 * 1024,
        pooled=(21 * 32_768 + 20 * 1024) * 1024,
        index=21 * 32_768 * 256,
        pending=(20 * 128 * 1024 + 21 * 8 * 2560) * 4,
    )


def test_trap_gpt_oss_slides_first_and_sinks_store_nothing() -> None:
    layout = from_config("gpt-oss-120b")
    assert [layer.index for layer in layout.layers if layer.window == 128] == list(range(0, 36, 2))
    assert all(layer.sinks for layer in layout.layers)
    assert bytes_at(layout, 1).total == 36 * 8 * 128 * 2


def test_trap_north_full_layers_and_its_native_context() -> None:
    layout, row = from_config("north-mini-code-1.0"), rows.row("north-mini-code-1.0")
    assert [layer.index for layer in layout.layers if layer.window is None] == list(range(0, 49, 4))
    assert {layer.window for layer in layout.layers} == {None, 4096}
    # the file claims more than the model was released for; the raw file is read as it stands
    assert (layout.native_context, from_config(row.config).native_context) == (262_144, 500_000)
    assert row.window is not None and "4097" in row.window


@pytest.mark.parametrize(
    ("name", "growing", "window"),
    [
        ("deepseek-v3.2", 61 * (656 + 132), 0),
        ("glm-5.2", 78 * 656 + 21 * 132, 0),
        ("deepseek-v4-flash", 21 * (584 + 132) / 4 + 20 * 584 / 128, 43 * 128 * 584),
    ],
)
def test_packed_records_of_vllm(name: str, growing: float, window: int) -> None:
    layout = from_config(name)
    assert [shipped.name for shipped in rows.row(name).formats] == ["fp8_ds_mla"]
    assert bytes_per_token(layout, "fp8_ds_mla").growing == growing
    assert bytes_at(layout, 1_048_576, "fp8_ds_mla").total == growing * 1_048_576 + window


def test_a_shipped_format_stands_beside_bfloat16() -> None:
    report = inspect_report(from_config("gemma-4-31b"), "gemma-4-31b", [131_072], row=rows.row("gemma-4-31b"))
    (row,) = report["contexts"]
    assert row["shipped"]["fp8_e4m3"]["total"] * 2 == row["total"] == FACTS["gemma-4-31b"].totals[0]
    assert row["shipped"]["fp8_e4m3"]["total_without_hybrid_manager"] * 2 == row["total_without_hybrid_manager"]
    assert report["shipped_bytes_per_token"] == {"fp8_e4m3": 40_960}


def test_a_format_that_does_not_fit_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"'fp8_ds_mla' has no record for KV\(kv_heads=8"):
        state_bytes(KV(8, 128, 128), "fp8_ds_mla")
    with pytest.raises(LayoutError, match="no record for Latent"):
        state_bytes(Latent(256, 64), "fp8_ds_mla")
    with pytest.raises(LayoutError, match="no index key of 64 dims"):
        index_bytes(IndexKeys(64), "fp8_ds_mla")
    with pytest.raises(LayoutError, match=r"unknown cache dtype 'fp8_ds'.*did you mean 'fp8_ds_mla'"):
        state_bytes(Pooled(4, 512), "fp8_ds")
    assert index_bytes(None, "fp8_ds_mla") == 0 and index_bytes(IndexKeys(128), "bfloat16") == 256


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("qwen3.6-27b", ["16 of 64 layers would page (3, 7, 11,", "3145728 B each"]),
        ("qwen3.6-35b-a3b", ["10 of 40 layers would page (3, 7, 11,", "2097152 B each"]),
        ("kimi-k3", ["24 of 93 layers would page (3, 7,", "91-92)", "6291456 B each"]),
        ("nemotron-3-nano-30b-a3b", ["6 of 52 layers would page (5, 12, 19, 26, 33, 42)", "2097152 B each"]),
        ("nemotron-3-ultra-550b-a55b", ["12 of 108 layers would page (7, 14, 23, 32, 39, 48,", "8388608 B each"]),
        ("inkling", ["66 of 66 layers would page", "the state of 66 of 66 layers: a convolution window (kernel 4)"]),
        ("lfm2.5-16layer", ["6 of 16 layers would page (2, 5, 8, 10, 12, 14)"]),
    ],
)
def test_refused_rows_say_what_would_page_and_what_is_missing(name: str, parts: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        from_config(name)
    for part in [f"{name}: ", *parts, "a state-transition adapter would have to snapshot, fork, roll back and count"]:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_rows_are_recognised_without_their_type_too(name: str) -> None:
    config = dict(rows.row(name).config)
    inner = dict(config.get("text_config", config)) | {"model_type": "llama"}
    with pytest.raises(UnsupportedModel, match=r"beside its KV cache \(key '"):
        from_config(inner)


@pytest.mark.parametrize("name", rows.ids())
def test_each_row_is_whole(name: str) -> None:
    row = rows.row(name)
    assert row.id == name and row.evidence.sources and row.formats and row.context.native > 0
    stated = row.config.get("text_config", row.config).get("max_position_embeddings", row.context.native)
    assert stated == row.context.native or row.context.note, "a differing configuration needs a note"
    assert row.context.advertised is None or row.context.note
    if name in ADMITTED:
        layout = from_config(name)
        assert all(bytes_at(layout, 8, shipped.name).total > 0 for shipped in row.formats)
        windowed = any(layer.window for layer in layout.layers)
        assert (row.window is not None) == windowed


def test_an_id_wins_over_a_folder_unless_that_is_written_as_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hy3"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(rows.row("llama-3.1-8b").config)))
    monkeypatch.chdir(tmp_path)
    assert len(from_config("hy3").layers) == 80
    for path in (f".{os.sep}hy3", Path("hy3"), str(folder)):
        assert len(from_config(path).layers) == 32


def test_names_that_are_none() -> None:
    with pytest.raises(LayoutError, match=r"hy4: no such file.*did you mean 'hy3'"):
        from_config("hy4")
    with pytest.raises(LayoutError, match=r"hf download Tencent/Hy3 config.json .the registry has its layout: hy3."):
        from_config("Tencent/Hy3")
    with pytest.raises(LayoutError, match=r"no model 'gpt-oss-20' in the registry.*did you mean 'gpt-oss-20b'"):
        rows.row("gpt-oss-20")
    assert rows.find("../registry/hy3") is None and rows.find(Path("hy3")) is None


def test_the_page_is_what_the_rows_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == listing.markdown(), "run: kvassay inspect --markdown > docs/registry.md"


def test_the_page_and_the_list_hold_every_model_once() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [text.count(f"\n## {name}\n") for name in rows.ids()] == [1] * 37
    assert [entry["id"] for entry in listing.entries() if entry["refused"]] == list(REFUSED)
    assert "| [gemma-4-31b](#gemma-4-31b) | 60 of 60 | 80.00 | 10.781 | 20.781 | 38.928* | 80.781* | 880.000 |" in text
