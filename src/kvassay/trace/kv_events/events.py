"""KV events as vLLM encodes them, read into plain records.

A batch is a msgpack array `[ts, events, data_parallel_rank]`. An event is a map with its `type` (vLLM 0.32), or in
older releases an array: the type, then the fields in the order below, later ones left out at their defaults.
Fields that are not needed here (LoRA, extra keys, locality) are skipped. Source: `vllm.distributed.kv_events`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvassay.errors import TraceError, did_you_mean
from kvassay.trace.kv_events.frames import Frame

Hash = int | bytes
"""The low 64 bits of a block's chained hash, or all of its bytes, as the engine was told to send it."""

_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


@dataclass(frozen=True)
class Stored:
    """Blocks became findable, in the order of their tokens."""

    hashes: tuple[Hash, ...]
    parent: Hash | None
    """Hash of the block before the first token, None at the start of a prompt."""
    tokens: tuple[int, ...]
    """All tokens of the range, also of blocks that a windowed group leaves out of `hashes`."""
    block_size: int
    group: int
    medium: str
    kind: str | None = None
    """The group's kind as the engine names it (full_attention, sliding_window, ...)."""
    window: int | None = None

    @property
    def complete(self) -> bool:
        """Whether every block of the range has its hash here: only then do hashes and tokens match by position."""
        return len(self.tokens) == len(self.hashes) * self.block_size


@dataclass(frozen=True)
class Removed:
    """Copies of blocks are gone."""

    hashes: tuple[Hash, ...]
    group: int
    medium: str


@dataclass(frozen=True)
class Cleared:
    """The whole cache was emptied."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True)
class Batch:
    """What one message said."""

    number: int
    rank: int
    """Data-parallel rank of the sender; each rank is a stream of its own."""
    events: tuple[Event, ...]


def decode(frame: Frame) -> Batch:
    """Read one message; `TraceError` names it and what is wrong."""
    try:
        import msgspec
    except ModuleNotFoundError:
        raise TraceError("reading KV events needs msgspec: pip install 'kvassay[events]'") from None
    where = f"message {frame.number}"
    try:
        batch = msgspec.msgpack.decode(frame.payload)
    except msgspec.DecodeError as error:
        raise TraceError(f"{where}: not msgpack: {error}") from None
    if not isinstance(batch, list) or not 2 <= len(batch) <= 3 or not isinstance(batch[1], list):
        raise TraceError(f"{where}: a batch is [ts, events, data_parallel_rank]")
    rank = batch[2] if len(batch) == 3 and batch[2] is not None else 0
    return Batch(frame.number, int(rank), tuple(_events(where, batch[1])))


def _events(where: str, raw: Sequence[Any]) -> Iterator[Event]:
    for ordinal, one in enumerate(raw):
        place = f"{where} event {ordinal}"
        kind, data = _named(place, one)
        try:
            yield _event(kind, data)
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{place}: {kind} is not as vLLM sends it: {error!r}") from None


def _named(place: str, one: Any) -> tuple[str, Mapping[str, Any]]:
    """The type of an event and its fields by name, from either encoding."""
    if isinstance(one, dict):
        kind, data = one.get("type"), one
    elif isinstance(one, list) and one:
        kind = one[0]
        data = dict(zip(_FIELDS.get(str(kind), ()), one[1:], strict=False))
    else:
        raise TraceError(f"{place}: an event is a map or an array, not {type(one).__name__}")
    if kind not in _FIELDS:
        raise TraceError(f"{place}: unknown type '{kind}'{did_you_mean(str(kind), _FIELDS)}")
    return kind, data


def _event(kind: str, data: Mapping[str, Any]) -> Event:
    if kind == "AllBlocksCleared":
        return Cleared()
    hashes = tuple(_hash(one) for one in data["block_hashes"])
    group, medium = data.get("group_idx") or 0, data.get("medium") or "GPU"
    if kind == "BlockRemoved":
        return Removed(hashes, int(group), medium)
    parent = data["parent_block_hash"]
    size = int(data["block_size"])
    if size < 1:
        raise ValueError(f"block_size {size}")
    return Stored(
        hashes,
        None if parent is None else _hash(parent),
        tuple(int(token) for token in data["token_ids"]),
        size,
        int(group),
        medium,
        data.get("kv_cache_spec_kind"),
        data.get("kv_cache_spec_sliding_window"),
    )


def _hash(value: Any) -> Hash:
    if type(value) is not int and not isinstance(value, bytes):
        raise TypeError(f"{value!r} is no block hash")
    return value
