"""Bytes of what a cache stores, in plain dtypes and in the record formats engines pack it into.

A record holds one latent or one compressed entry with its scales. From vLLM 0.33, `flashmla_sparse.py` and the
attention of `deepseek_v32` and `deepseek_v4`; pages there may be rounded up, which is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvassay.errors import LayoutError, did_you_mean
from kvassay.layout.model import DTYPE_BYTES, IndexKeys, Latent, Pooled, Storage


@dataclass(frozen=True)
class Records:
    """Bytes of the vectors and index keys of one packed format."""

    vectors: Mapping[tuple[int, int], int]
    """By plain and rotary elements of the vector."""
    index: Mapping[int, int]
    """By dims of an index key."""


RECORDS = {
    "fp8_ds_mla": Records(
        # 512 fp8 + 4 fp32 scales + 64 bf16 rotary; 448 fp8 + 64 bf16 rotary + 7 ue8m0 scales + 1 of padding
        vectors={(512, 64): 656, (448, 64): 584},
        index={128: 132},  # 128 fp8 and one fp32 scale
    )
}
"""Packed formats by the name vLLM gives them."""

_V4_ROTARY = 64
"""Rotary elements at the end of a compressed entry, which is laid out as the raw vectors beside it."""


def state_bytes(storage: Storage, name: str) -> float:
    """Return the bytes of one state (token or entry) in format `name`.

    `LayoutError` if the name is unknown, or the format has no record for this storage.
    """
    if name in DTYPE_BYTES:
        return storage.elements * DTYPE_BYTES[name]
    records = _records(name)
    shape = (0, 0)
    if isinstance(storage, Latent):
        shape = (storage.dim, storage.rope_dim)
    elif isinstance(storage, Pooled):
        shape = (storage.dim - _V4_ROTARY, _V4_ROTARY)
    if shape not in records.vectors:
        raise LayoutError(f"format '{name}' has no record for {storage}")
    return records.vectors[shape]


def index_bytes(index: IndexKeys | None, name: str) -> float:
    """Return the bytes of the index keys of one state in format `name`; 0 without an index. Errors as above."""
    if index is None:
        return 0.0
    if name in DTYPE_BYTES:
        return index.dim * index.heads * DTYPE_BYTES[name]
    records = _records(name)
    if index.dim not in records.index:
        raise LayoutError(f"format '{name}' has no index key of {index.dim} dims")
    return records.index[index.dim] * index.heads


def _records(name: str) -> Records:
    if name not in RECORDS:
        raise LayoutError(f"unknown cache dtype '{name}'{did_you_mean(name, {*DTYPE_BYTES, *RECORDS})}")
    return RECORDS[name]
