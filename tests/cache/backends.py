"""The two managers behind `cache.protocol.Manager`, and how to compare what they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec

import pytest

from kvassay.cache.ops import GroupSpec
from kvassay.cache.protocol import Removed, Stored

NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed in this environment: make vllm"),
]
BACKENDS = ["ours", pytest.param("vllm", marks=NEEDS_VLLM)]


def make(backend: str, groups: Iterable[GroupSpec], num_blocks: int, max_tokens: int = 256, **options):
    """A manager; vLLM is imported only when it is asked for."""
    if backend == "ours":
        from kvassay.cache.manager import PagedManager

        return PagedManager(groups, num_blocks, max_tokens, **options)
    from kvassay.cache.vllm.manager import VllmManager

    return VllmManager(groups, num_blocks, max_tokens, **options)


class Contents:
    """What each key stands for, learnt from live requests, so that keys of two hash functions compare."""

    def __init__(self, groups: Iterable[GroupSpec], removed_per_copy: bool) -> None:
        self.groups = tuple(groups)
        self.removed_per_copy = removed_per_copy
        self.known: dict[tuple[int, int], tuple[int, ...]] = {}
        self.copies: Counter[tuple[int, int]] = Counter()

    def learn(self, manager, request: str, tokens: Iterable[int]) -> None:
        tokens = tuple(tokens)
        for group in self.groups:
            for i, key in enumerate(manager.keys(request, group.index)):
                prefix = tokens[: (i + 1) * group.block_size]
                assert self.known.setdefault((group.index, key), prefix) == prefix

    def translate(self, events: Iterable[Stored | Removed]) -> list[tuple[str, int, tuple[int, ...]]]:
        """Events by content; of several copies of a key only the last one's removal, as our pool has it."""
        out = []
        for event in events:
            at = event.group, event.key
            stored = isinstance(event, Stored)
            self.copies[at] += 1 if stored else -1 if self.removed_per_copy else -self.copies[at]
            assert self.copies[at] >= 0
            if stored or self.copies[at] == 0:
                out.append((type(event).__name__, event.group, self.known[at]))
        return out
