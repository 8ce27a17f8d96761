"""The scheduler's cache manager being vLLM's own."""

from __future__ import annotations

from collections.abc import Sequence

from kvassay.cache.prefix import Hit
from kvassay.cache.protocol import Admitted
from kvassay.cache.vllm.edits import follow
from kvassay.cache.vllm.manager import VllmManager
from kvassay.errors import CacheError
from kvassay.replay.serving.backend import RETENTION, OursBackend
from kvassay.replay.serving.geometry import Geometry


class VllmBackend:
    """`Backend` over vLLM's `KVCacheManager`.

    With `edits`, our ledger runs beside it: an edit is defined there and carried out on vLLM's tables (`follow`), and
    `CacheError` is raised if the two ever admit or grow differently.
    """

    name = "vllm"

    def __init__(self, geometry: Geometry, num_blocks: int, max_units: int, edits: bool = False) -> None:
        self.manager = VllmManager(geometry.groups, num_blocks, max_units, retention_interval=RETENTION)
        self.usable = num_blocks - 1
        self._ours = OursBackend(geometry, num_blocks, max_units) if edits else None

    @property
    def free_blocks(self) -> int:
        """See `Backend.free_blocks`."""
        return int(self.manager.pool.get_num_free_blocks())

    def lookup(self, units: Sequence[int]) -> Hit:
        """See `Backend.lookup`."""
        return self.manager.lookup(units)

    def revived(self, hit: Hit) -> int:
        """See `Backend.revived`."""
        blocks = self.manager.pool.blocks
        return sum(blocks[block].ref_cnt == 0 for ids in hit.blocks for block in ids if block)

    def admit(self, request: str, units: Sequence[int], count: int, prompt: int) -> Admitted | None:
        """See `Backend.admit`."""
        self.manager.manager.take_events()
        admitted = self.manager.admit(request, units, count, prompt_tokens=prompt)
        if self._ours is not None:
            self._same(request, admitted, self._ours.admit(request, units, count, prompt))
        return admitted

    def append(self, request: str, units: Sequence[int]) -> bool:
        """See `Backend.append`."""
        grown = self.manager.append(request, units)
        if self._ours is not None:
            self._same(request, grown, self._ours.append(request, units))
        return grown

    def free(self, request: str) -> None:
        """See `Backend.free`."""
        self.manager.free(request)
        if self._ours is not None:
            self._ours.free(request)

    def tables(self, request: str) -> tuple[tuple[int, ...], ...]:
        """See `Backend.tables`."""
        return self.manager.tables(request)

    def release(self, request: str, fraction: float, full_units: int, first: int = 0) -> int:
        """See `Backend.release`."""
        ours = self._editor(request)
        gone = ours.release(request, fraction, full_units, first)
        follow(ours.manager, self.manager, request)
        return gone

    def rewrite(self, request: str) -> bool:
        """See `Backend.rewrite`."""
        ours = self._editor(request)
        done = ours.rewrite(request)
        follow(ours.manager, self.manager, request)
        return done

    def _editor(self, request: str) -> OursBackend:
        if self._ours is None:
            raise CacheError(f"request '{request}': this backend was made without edits")
        return self._ours

    def _same(self, request: str, theirs: object, ours: object) -> None:
        if theirs != ours:
            raise CacheError(f"request '{request}': vLLM says {theirs}, our ledger {ours}")
