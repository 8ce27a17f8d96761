"""The index against streams written by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvassay.errors import TraceError
from kvassay.trace.kv_events.frames import Frame
from kvassay.trace.kv_events.index import Gap, Key, KVIndex, rebuild
from kvassay.trace.kv_events.render import index_data
from tests.trace.kv_events.build import CLEARED, message, removed, stored


def index_of(*events: Any) -> KVIndex:
    return rebuild([message(i, event) for i, event in enumerate(events)], "made")


def key(block_hash: int | bytes, group: int = 0) -> Key:
    return Key("GPU", group, block_hash)


def test_a_chain_over_two_messages() -> None:
    index = index_of(stored([11, 12], [1, 2, 3, 4]), stored([13], [5, 6], parent=12))
    assert index.chain(key(13)) == (key(11), key(12), key(13))
    assert index.tokens(key(13)) == (1, 2, 3, 4, 5, 6)
    assert (index.stored, index.orphans, index.unmapped) == (3, 0, 0)


def test_hashes_of_64_bits_and_of_bytes_stay_whole() -> None:
    index = index_of(stored([2**64 - 1, 2**32 - 1], [1, 2, 3, 4]), stored([b"\xff" * 32], [7, 8]))
    assert index.tokens(key(2**32 - 1)) == (1, 2, 3, 4)
    assert index.tokens(key(b"\xff" * 32)) == (7, 8)
    assert len(index.blocks) == 3


def test_a_removed_parent_breaks_the_chain_but_not_the_block() -> None:
    index = index_of(stored([11, 12, 13], [1, 2, 3, 4, 5, 6]), removed(12))
    assert index.holds(13)
    assert index.chain(key(13)) is None
    assert index.tokens(key(13)) is None
    assert list(index.broken()) == [key(13)]
    assert index.tokens(key(11)) == (1, 2)


def test_a_block_stays_until_its_last_copy_goes() -> None:
    """Two requests computed the same block: the first removal must not lose what follows (vllm #55092)."""
    index = index_of(stored([11], [1, 2]), stored([11], [1, 2]), removed(11))
    assert index.blocks[key(11)].copies == 1
    assert index.tokens(key(11)) == (1, 2)
    index = index_of(stored([11], [1, 2]), stored([11], [1, 2]), removed(11), removed(11))
    assert not index.holds(11)
    assert index.unknown_removals == 0


def test_groups_keep_the_same_hash_apart() -> None:
    index = index_of(stored([11], [1, 2]), stored([11], [1, 2], group=1), removed(11, group=1))
    assert index.holds(11, group=0)
    assert not index.holds(11, group=1)


def test_hashes_left_out_by_a_window_are_not_matched_by_position() -> None:
    """Tokens of 4 blocks, hashes of the last 2: 13 is not tokens 1, 2, and 13 is not the parent of 14 by position."""
    index = index_of(stored([13, 14], [1, 2, 3, 4, 5, 6, 7, 8], group=1, kv_cache_spec_kind="sliding_window"))
    assert index.blocks[key(13, 1)].tokens is None
    assert not index.blocks[key(14, 1)].parent_known
    assert index.tokens(key(14, 1)) is None
    assert index.unmapped == 2
    assert list(index.broken()) == []


def test_a_block_once_mapped_stays_mapped() -> None:
    index = index_of(stored([11, 12], [1, 2, 3, 4]), stored([12], [1, 2, 3, 4]))
    assert index.tokens(key(12)) == (1, 2, 3, 4)
    assert index.unmapped == 0


def test_a_parent_in_another_group_is_known_and_one_in_none_is_an_orphan() -> None:
    index = index_of(stored([11, 12], [1, 2, 3, 4]), stored([13], [5, 6], parent=12, group=1))
    assert index.orphans == 0
    assert list(index.broken()) == [key(13, 1)]
    index = index_of(stored([11], [1, 2]), stored([13], [5, 6], parent=12))
    assert index.orphans == 1
    assert index.chain(key(13)) is None


def test_clearing_forgets_everything() -> None:
    index = index_of(stored([11], [1, 2]), CLEARED, stored([12], [3, 4]))
    assert (list(index.blocks), index.clears) == ([key(12)], 1)


def test_a_removal_of_what_was_never_there_is_counted() -> None:
    assert index_of(removed(11, 12)).unknown_removals == 2


def test_media_are_apart() -> None:
    index = index_of(stored([11], [1, 2]), stored([11], [1, 2], medium="CPU"), removed(11))
    assert list(index.blocks) == [Key("CPU", 0, 11)]


# -- gaps -----------------------------------------------------------------------------------------------


def test_a_gap_is_refused_unless_told_to_forget() -> None:
    frames = [message(0, stored([11], [1, 2])), message(3, stored([12], [3, 4], parent=11), removed(11))]
    with pytest.raises(TraceError, match="made: messages 1 to 2 are missing"):
        rebuild(frames, "made")
    index = rebuild(frames, "made", "forget")
    assert index.gaps == [Gap(1, 2)]
    assert (index.holds(11), index.orphans, index.unknown_removals) == (False, 1, 1)


def test_a_stream_that_begins_late_has_a_gap_before_it() -> None:
    with pytest.raises(TraceError, match="messages 0 to 6 are missing"):
        rebuild([message(7, CLEARED)], "made")
    assert rebuild([message(7, CLEARED)], "made", "forget").gaps == [Gap(0, 6)]


@pytest.mark.parametrize("numbers", [(0, 0), (0, 1, 0)])
def test_a_stream_only_goes_forward(numbers: tuple[int, ...]) -> None:
    with pytest.raises(TraceError, match=f"message 0 comes after {numbers[-2]}"):
        rebuild([message(number, CLEARED) for number in numbers], "made", "forget")


def test_ranks_are_streams_of_their_own() -> None:
    with pytest.raises(TraceError, match="message 1 is of rank 2, the ones before of 1"):
        rebuild([message(0, rank=1), message(1, rank=2)], "made")


# -- encodings ------------------------------------------------------------------------------------------


def test_the_older_array_encoding_says_the_same() -> None:
    event = ["BlockStored", [11], None, [1, 2], 2, None, "GPU", None, None, 3, "full_attention"]
    index = index_of(
        event, ["BlockRemoved", [9], "GPU", 3], ["AllBlocksCleared"], ["BlockStored", [5], 4, [1, 2], 2, None]
    )
    assert (index.stored, index.removed, index.clears, index.orphans) == (2, 1, 1, 1)
    assert list(index.blocks) == [key(5)]


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (Frame(0, b"\xc1"), "made: message 0: not msgpack"),
        (Frame(0, msgspec.msgpack.encode({"ts": 1})), "message 0: a batch is"),
        (message(0, {"type": "BlockStore"}), "message 0 event 0: unknown type 'BlockStore' .*'BlockStored'"),
        (message(0, CLEARED, 7), "message 0 event 1: an event is a map or an array, not int"),
        (message(0, {"type": "BlockRemoved", "medium": None}), "BlockRemoved is not as vLLM sends it: KeyError"),
        (message(0, stored([1.5], [1, 2])), "1.5 is no block hash"),
        (message(0, stored([1], [1, 2], size=0)), "block_size 0"),
    ],
)
def test_a_bad_message_is_named(frame: Frame, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        rebuild([frame], "made")


def test_the_summary_by_hand() -> None:
    """Group 0: 11-12 reach 4 tokens, 14 hangs on a lost 13; group 1 holds two copies of 12, unmapped."""
    index = index_of(
        stored([11, 12, 13, 14], [1, 2, 3, 4, 5, 6, 7, 8]),
        removed(13),
        stored([12], [1, 2, 3, 4], group=1),
        stored([12], [1, 2, 3, 4], group=1),
    )
    data = index_data(index)
    assert data["groups"] == [
        {
            "medium": "GPU",
            "group": 0,
            "block_sizes": [2],
            "blocks": 3,
            "copies": 3,
            "mapped": 3,
            "broken": 1,
            "reach": 4,
        },
        {
            "medium": "GPU",
            "group": 1,
            "block_sizes": [2],
            "blocks": 1,
            "copies": 2,
            "mapped": 0,
            "broken": 0,
            "reach": 0,
        },
    ]
    assert (data["stored"], data["removed"], data["unmapped"]) == (6, 1, 2)
