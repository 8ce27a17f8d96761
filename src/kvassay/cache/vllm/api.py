"""The parts of vLLM that are driven here, checked for a version they are known to work with.

Signatures drift from release to release (keywords come, go and are renamed), so calls name every argument
and `call` passes on those that the installed version takes.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvassay.errors import CacheError

OLDEST, NEWEST = (0, 25, 1), (0, 33)
"""First release and last release series supported. Before 0.25 freed blocks come back in another order."""


@dataclass(frozen=True)
class Api:
    """vLLM's classes and functions; a field is the object of that name."""

    version: str
    KVCacheManager: Any
    BlockPool: Any
    KVCacheConfig: Any
    KVCacheGroupSpec: Any
    FullAttentionSpec: Any
    MLAAttentionSpec: Any
    SlidingWindowSpec: Any
    Request: Any
    SamplingParams: Any
    BlockStored: Any
    BlockRemoved: Any
    block_hasher: Callable[[int], Any]
    """Makes the function that hashes a request's tokens in blocks of so many, with sha256."""


@cache
def api() -> Api:
    """Import vLLM, once (it takes about ten seconds); `CacheError` without it or with another version."""
    try:
        vllm = importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        raise CacheError(f"vLLM cannot be imported ({error}): `make vllm` sets up an environment that has it") from None
    check_version(str(vllm.__version__))
    core, events = "vllm.v1.core.", _names("vllm.distributed.kv_events", "BlockStored", "BlockRemoved")
    hashing = importlib.import_module(core + "kv_cache_utils")
    sha256 = importlib.import_module("vllm.utils.hashing").sha256
    hashing.init_none_hash(sha256)
    return Api(
        version=str(vllm.__version__),
        block_hasher=lambda block_size: hashing.get_request_block_hasher(block_size, sha256),
        **events,
        **_names(core + "kv_cache_manager", "KVCacheManager"),
        **_names(core + "block_pool", "BlockPool"),
        **_names(
            "vllm.v1.kv_cache_interface",
            *("KVCacheConfig", "KVCacheGroupSpec", "FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"),
        ),
        **_names("vllm.v1.request", "Request"),
        **_names("vllm.sampling_params", "SamplingParams"),
    )


def check_version(version: str) -> None:
    """`CacheError` that names the supported versions, unless `version` is one of them."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST or numbers[:2] > NEWEST:
        oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
        raise CacheError(f"vLLM {version} is not supported: {oldest} to {newest}.x are")


def call(function: Callable[..., Any], /, **arguments: Any) -> Any:
    """Call with those of the keyword arguments that this version's signature has."""
    taken = inspect.signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in taken})


def takes(function: Callable[..., Any], argument: str) -> bool:
    """Whether this version's signature has a keyword argument."""
    return argument in inspect.signature(function).parameters


def _names(module: str, *names: str) -> dict[str, Any]:
    loaded = importlib.import_module(module)
    return {name: getattr(loaded, name) for name in names}
