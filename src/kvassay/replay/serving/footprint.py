"""What a policy changes in serving, as numbers: blocks, bytes, traffic, hashes, correctness.

No policy runs here. What a run measured on one context is applied to every request, whatever its length: an
extrapolation, said in every result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvassay.errors import CacheError

Timing = Literal["after_prefill", "from_start", "every_n"]
"""`after_prefill`: a prompt lies dense in the pool until its prefill ends, then blocks are freed.
`from_start`: what is stored is smaller from the first token on (an fp8 cache): every block holds more tokens.
`every_n`: a prompt stays as it is; each `interval` generated tokens are compressed once, when they are complete."""


@dataclass(frozen=True)
class Footprint:
    """One arm's effect on a request, as fractions of dense; only groups that no window bounds are touched."""

    arm: str
    mode: str = "whole_block"
    """How the engine takes blocks back (`cache.reclaim.Mode`)."""
    how: Literal["measured", "assumed"] = "assumed"
    source: str = ""
    """Run, model, workload and context the numbers are from."""
    timing: Timing = "after_prefill"
    selected_fraction: float = 1.0
    """Tokens a decode step reads / tokens in the cache, in the arm's scope."""
    retained_fraction: float = 1.0
    """Bytes held / dense's, in the arm's scope."""
    interval: int = 0
    """Generated tokens that are compressed together; with timing `every_n` alone."""
    freed_fraction: float = 0.0
    """Blocks freed / blocks of the context, in [0, 1); of an interval, with timing `every_n`."""
    read_fraction: float = 1.0
    """KV bytes read per decoded token / dense's, in the arm's scope."""
    writes: bool = False
    """Whether kept blocks are written: they lose their prefix hash, and are copied first if another request holds
    them. Without, blocks are only let go, and stay findable until they are reused."""
    side_fraction: float = 0.0
    """Bytes kept beside the blocks / bytes of the blocks: each block of the pool costs so much more."""
    scan_fraction: float = 0.0
    """Bytes touched once per request to score and edit it / bytes of its dense cache in scope."""
    correct: float | None = None
    """Share of right answers in the closed loop, measured; None: not known."""
    dense_correct: float | None = None
    """The same for dense, in the same questions."""

    def __post_init__(self) -> None:
        """Raise `CacheError` for a fraction out of range."""
        if not 0 <= self.freed_fraction < 1:
            raise CacheError(f"{self.arm}: freed_fraction is {self.freed_fraction:g}, must be in [0, 1)")
        if (self.timing == "every_n") != (self.interval > 0):
            raise CacheError(f"{self.arm}: timing '{self.timing}' with interval {self.interval}; every_n needs one")
        for name in ("selected_fraction", "retained_fraction", "read_fraction", "side_fraction", "scan_fraction"):
            if not getattr(self, name) >= 0:
                raise CacheError(f"{self.arm}: {name} is {getattr(self, name)}, must be at least 0")
        for name in ("correct", "dense_correct"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise CacheError(f"{self.arm}: {name} is {share:g}, must be in [0, 1]")

    @property
    def edits(self) -> bool:
        """Whether requests are edited after their prefill."""
        return self.timing == "after_prefill" and (self.freed_fraction > 0 or self.writes)

    @property
    def windows(self) -> bool:
        """Whether what requests generate is edited, interval by interval."""
        return self.timing == "every_n" and self.freed_fraction > 0

    @property
    def block_scale(self) -> float:
        """Bytes of one block with all that belongs to it / bytes of a dense block."""
        stored = 1 - self.freed_fraction if self.timing == "from_start" else 1.0
        return stored + self.side_fraction


DENSE = Footprint("dense", how="measured", source="by definition")
"""The reference every other arm is compared with."""


def dropped(blocks: int, fraction: float) -> list[int]:
    """Which of `blocks` full blocks go: `floor(fraction * blocks)`, spread evenly, never the first one."""
    count = int(fraction * blocks + 1e-9)
    return [i for i in range(blocks) if (i + 1) * count // blocks != i * count // blocks]
