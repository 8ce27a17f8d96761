from __future__ import annotations

import pytest

from kvassay.errors import RecordError
from kvassay.layout.config import from_config
from kvassay.layout.model import Layout
from kvassay.record.vllm.subset import chosen_layers, chosen_q_heads, part_of
from tests.record import tiny


def layout(family: str) -> Layout:
    return from_config(tiny.config_of(family))


def test_a_part_is_numbered_anew() -> None:
    part = part_of(layout("gemma3"), [0, 2], [1])
    assert [(x.index, x.kind, x.q_heads, x.kv.kv_heads) for x in part.layers] == [
        (0, "sliding", 2, 1),
        (1, "full", 2, 1),
    ]
    assert part_of(layout("gemma3"), [0, 1, 2, 3], None) == layout("gemma3")


def test_query_heads_go_with_their_kv_head() -> None:
    assert chosen_q_heads(layout("llama"), 0, [1]) == [2, 3]
    assert chosen_q_heads(layout("llama"), 0, None) is None
    with pytest.raises(RecordError, match="KV head 2: layer 0 has heads 0 to 1"):
        chosen_q_heads(layout("llama"), 0, [2])


def test_a_layer_comes_with_the_cache_it_reads() -> None:
    shared = layout("gemma4")
    assert (shared.layers[4].cache_of, shared.layers[5].cache_of) == (2, 3)
    part = part_of(shared, [2, 4], None)
    assert [layer.cache_of for layer in part.layers] == [None, 0]
    with pytest.raises(RecordError, match="layer 4 reads the cache of layer 2"):
        chosen_layers(shared, [4])
    with pytest.raises(RecordError, match="layer 9: the model has layers 0 to 5"):
        chosen_layers(shared, [9])
