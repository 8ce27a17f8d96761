"""KV cache groups. Expected values are those of vLLM 0.32's own planning functions on the same shapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvassay.errors import LayoutError, UnsupportedModel
from kvassay.layout.config import from_config
from kvassay.layout.groups import Group, paged_part, plan_groups
from kvassay.layout.model import KV, All, Component, IndexKeys, Latent, Layer, Layout, Storage, TopK, Window
from tests.layout.configs import PUBLISHED

A, B, C = KV(2, 64, 64), KV(1, 64, 64), KV(1, 96, 96)


def make(*layers: tuple[Storage, int | None]) -> Layout:
    return Layout(
        "made",
        tuple(
            Layer(at, 8, (Component(storage, Window(window) if window else All()),), 1.0)
            for at, (storage, window) in enumerate(layers)
        ),
        hidden_size=8,
        vocab_size=8,
        native_context=8,
    )


def shape(groups: tuple[Group, ...]) -> list[tuple[tuple[int, ...], int, int, int | None]]:
    return [(group.layers, group.padding, group.block_size, group.window) for group in groups]


def test_gemma_3_270m_is_six_groups_of_three() -> None:
    groups = plan_groups(from_config("gemma-3-270m"))
    assert shape(groups) == [
        ((0, 6, 12), 0, 16, 512),
        ((1, 7, 13), 0, 16, 512),
        ((2, 8, 14), 0, 16, 512),
        ((3, 9, 15), 0, 16, 512),
        ((4, 10, 16), 0, 16, 512),
        ((5, 11, 17), 0, 16, None),
    ]
    assert {group.page_bytes for group in groups} == {16_384}
    assert {group.block_bytes for group in groups} == {3 * 16_384}


# full block tokens, sliding block tokens, page bytes, layers per group, full groups, sliding groups, padding
UNIFORM = {
    "gemma-3-12b": (16, 16, 131_072, 8, 1, 5, 0),
    "gemma-3-27b": (16, 16, 131_072, 10, 1, 6, 8),
    "gemma-4-e2b": (16, 32, 32_768, 3, 1, 4, 0),
    "gemma-4-e4b": (16, 32, 65_536, 4, 1, 5, 0),
    "gemma-4-12b": (64, 16, 131_072, 8, 1, 5, 0),
    "gemma-4-26b-a4b": (32, 16, 131_072, 5, 1, 5, 0),
    "gemma-4-31b": (32, 16, 262_144, 10, 1, 5, 0),
    "laguna-s-2.1": (16, 16, 65_536, 12, 1, 3, 0),
    "step-3.7-flash": (16, 16, 65_536, 12, 1, 3, 3),
    "north-mini-code-1.0": (16, 16, 32_768, 13, 1, 3, 3),
    "mimo-v2-flash": (32, 16, 81_920, 9, 1, 5, 6),
    "gpt-oss-20b": (16, 16, 32_768, 12, 1, 1, 0),
}


@pytest.mark.parametrize("name", UNIFORM)
def test_published_models(name: str) -> None:
    layout = from_config(PUBLISHED[name])
    groups = plan_groups(layout)
    full = [group for group in groups if group.window is None]
    sliding = [group for group in groups if group.window is not None]
    assert UNIFORM[name] == (
        full[0].block_size,
        sliding[0].block_size,
        groups[0].page_bytes,
        len(groups[0].layers) + groups[0].padding,
        len(full),
        len(sliding),
        sum(group.padding for group in groups),
    )
    assert sorted(layer for group in groups for layer in group.layers) == [layer.index for layer in layout.storing]
    assert len({group.block_bytes for group in groups}) == 1


def test_sharing_layers_belong_to_their_producers_group_and_store_nothing() -> None:
    groups = plan_groups(from_config(PUBLISHED["gemma-4-e2b"]))
    (holder,) = [group for group in groups if 14 in group.layers]
    assert holder.layers == (4, 9, 14) and holder.readers == (19, 24, 29, 34)
    (other,) = [group for group in groups if 13 in group.layers]
    assert len(other.readers) == 16 and other.window == 512
    assert other.block_bytes == 3 * other.page_bytes


def test_models_of_one_kind_are_one_group() -> None:
    (llama,) = plan_groups(from_config(PUBLISHED["llama-3.1-8b"]))
    assert (llama.layers, llama.page_bytes, llama.block_bytes) == (tuple(range(32)), 65_536, 32 * 65_536)
    (windowed,) = plan_groups(from_config({**PUBLISHED["mistral-nemo-12b"], "sliding_window": 4096}))
    assert windowed.window == 4096 and len(windowed.layers) == 40
    (glm,) = plan_groups(from_config(PUBLISHED["glm-5.2"]))
    assert glm.page_bytes == 16 * 1152 and glm.block_bytes == 16 * (78 * 1152 + 21 * 256)
    (m3,) = plan_groups(from_config(PUBLISHED["minimax-m3"]))
    assert m3.block_bytes == 16 * (60 * 2048 + 57 * 256)


def test_the_paged_part_of_v4_is_its_windows() -> None:
    layout = from_config(PUBLISHED["deepseek-v4-flash"])
    with pytest.raises(UnsupportedModel, match="keeps compressed entries beside its window"):
        plan_groups(layout)
    (group,) = plan_groups(paged_part(layout))
    assert (group.layers, group.window) == (tuple(range(43)), 128)
    assert group.page_bytes == 16 * 512 * 2  # key and value in one
    assert group.block_bytes == 43 * group.page_bytes  # index keys go with the entries
    other = from_config(PUBLISHED["glm-5.2"])
    assert paged_part(other) == other


def test_group_size_pads_up_only_below_one_and_a_half() -> None:
    two_full_three_sliding = make((A, None), (A, 64), (A, None), (A, 64), (A, 64))
    assert shape(plan_groups(two_full_three_sliding)) == [  # 3 = 1.5 x 2: the minimum stands
        ((0, 2), 0, 16, None),
        ((1, 4), 0, 16, 64),
        ((3,), 1, 16, 64),
    ]
    three_full_four_sliding = make(*[(A, None)] * 3, *[(A, 64)] * 4)
    assert shape(plan_groups(three_full_four_sliding)) == [
        ((0, 1, 2), 1, 16, None),
        ((3, 4, 5, 6), 0, 16, 64),
    ]


def test_smaller_pages_get_larger_blocks_or_padding() -> None:
    divides = plan_groups(make((A, None), (B, 64)), block_size=8)
    assert [(g.block_size, g.page_bytes, g.page_padding) for g in divides] == [(8, 4096, 0), (16, 4096, 0)]
    pads = plan_groups(make((A, None), (C, 64)))
    assert [(g.block_size, g.page_bytes, g.page_padding) for g in pads] == [(16, 8192, 0), (16, 8192, 2048)]


def test_latents_cannot_be_padded() -> None:
    with pytest.raises(UnsupportedModel, match=r"layer 0 has latent pages of 18432 B.*65536 B.*cannot be padded"):
        plan_groups(make((Latent(512, 64), None), (KV(8, 128, 128), 64)))
    # as the widest type it is the others that give way
    padded = plan_groups(make((Latent(512, 64), None), (A, 64)))
    assert [(g.page_bytes, g.page_padding) for g in padded] == [(18_432, 0), (18_432, 18_432 - 8192)]


def test_what_is_not_planned_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModel, match=r"deepseek_v4: layer 2 keeps compressed entries.*packed path"):
        plan_groups(from_config(PUBLISHED["deepseek-v4-flash"]))
    indexed = Layer(0, 8, (Component(A, TopK(4), IndexKeys(64)),), 1.0)
    sliding = Layer(1, 8, (Component(A, Window(64)),), 1.0)
    with pytest.raises(UnsupportedModel, match="layer 0 keeps index keys in a model with window layers"):
        plan_groups(Layout("made", (indexed, sliding), 8, 8, 8))
    with pytest.raises(LayoutError, match="block_size is 0"):
        plan_groups(from_config("smollm2-135m"), block_size=0)


@given(st.lists(st.tuples(st.sampled_from([A, B, C, KV(3, 64, 32)]), st.sampled_from([None, 64, 128])), min_size=1))
def test_any_mix_keeps_the_pool_uniform(layers: list[tuple[Storage, int | None]]) -> None:
    layout = make(*layers)
    groups = plan_groups(layout)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(layers)))
    assert [group.index for group in groups] == list(range(len(groups)))
    assert len({group.block_bytes for group in groups}) == 1
    if len(groups) == 1:
        return
    assert len({len(group.layers) + group.padding for group in groups}) == 1
    for group in groups:
        (storage,) = {layers[layer][0] for layer in group.layers}
        assert {layers[layer][1] for layer in group.layers} == {group.window}
        assert group.block_size * storage.elements * 2 + group.page_padding == group.page_bytes
