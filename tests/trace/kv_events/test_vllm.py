"""Events of vLLM's own manager, through its own encoder, against what its pool really holds."""

from __future__ import annotations

import pytest

from kvassay.cache.ops import GroupSpec
from kvassay.trace.kv_events.frames import Frame
from kvassay.trace.kv_events.index import Key, KVIndex, rebuild

pytestmark = pytest.mark.vllm

GROUPS = (GroupSpec(0, (0,), (1,), 4), GroupSpec(1, (1,), (1,), 4, window=6))


def test_the_index_is_what_the_pool_can_find() -> None:
    """Prompts that share prefixes, a small pool that evicts, a windowed group that leaves blocks out."""
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    from kvassay.cache.vllm.manager import VllmManager

    manager = VllmManager(GROUPS, 40, 4096)
    encode = msgspec.msgpack.Encoder().encode
    frames: list[Frame] = []
    for number in range(60):
        tokens = [number % 3] * (8 + number % 5 * 4) + list(range(number, number + 9))
        assert manager.admit(str(number), tokens) is not None
        if number % 2:
            manager.free(str(number))
            manager.free(str(number - 1))
        batch = KVEventBatch(ts=0.0, events=manager.manager.take_events(), data_parallel_rank=0)
        frames.append(Frame(number, encode(batch)))
    index = rebuild(frames, "vllm")
    held: dict[Key, int] = {}
    for block in manager.pool.blocks:
        if block.block_hash is not None:
            name, group = block.block_hash[:-4], int.from_bytes(block.block_hash[-4:], "big")
            key = Key("GPU", group, int.from_bytes(name, "big") & (2**64 - 1))
            held[key] = held.get(key, 0) + 1
    assert {key: block.copies for key, block in index.blocks.items()} == held
    assert index.removed > 0
    assert index.unknown_removals == 0
    _tokens_follow(index)


def _tokens_follow(index: KVIndex) -> None:
    """In the group without a window every whole chain spells a prompt's beginning."""
    told = [index.tokens(key) for key in index.blocks if key.group == 0]
    spelled = [tokens for tokens in told if tokens is not None]
    assert spelled
    for tokens in spelled:
        run = next((i for i, token in enumerate(tokens) if token != tokens[0]), len(tokens))
        assert tokens[0] in (0, 1, 2)
        assert run >= min(8, len(tokens))
