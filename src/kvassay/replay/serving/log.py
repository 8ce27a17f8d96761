"""What happened in one replay, summed up as it goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvassay.replay.serving.flight import Flight
from kvassay.replay.serving.geometry import Geometry


@dataclass
class Log:
    """Flights, and time integrals of the pool and the batch; peaks beside them."""

    flights: list[Flight] = field(default_factory=list)
    refused: int = 0
    """Requests whose prompt and answer fit no empty pool (or the length limit)."""
    steps: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    preemptions: int = 0
    busy: float = 0.0
    """Seconds in which a step ran."""
    end: float = 0.0
    """When the last step ended."""
    request_seconds: float = 0.0
    token_seconds: float = 0.0
    block_seconds: float = 0.0
    peak_requests: int = 0
    peak_tokens: int = 0
    peak_blocks: int = 0
    samples: int = 0
    sampled_blocks: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Blocks held, by component, summed over samples."""

    def lasted(self, seconds: float, steps: int, running: int, tokens: int, blocks: int) -> None:
        """A batch ran for so long, holding so much at its end."""
        self.steps += steps
        self.busy += seconds
        self.request_seconds += seconds * running
        self.token_seconds += seconds * tokens
        self.block_seconds += seconds * blocks
        self.peak_requests = max(self.peak_requests, running)
        self.peak_tokens = max(self.peak_tokens, tokens)
        self.peak_blocks = max(self.peak_blocks, blocks)

    def sample(self, geometry: Geometry, tables: Iterable[tuple[tuple[int, ...], ...]]) -> None:
        """Count the distinct blocks that requests hold, by component."""
        held: list[set[int]] = [set() for _ in geometry.groups]
        for one in tables:
            for blocks, found in zip(one, held, strict=True):
                found.update(blocks)
        self.samples += 1
        for kind, found in zip(geometry.components, held, strict=True):
            self.sampled_blocks[kind] += len(found - {0})
