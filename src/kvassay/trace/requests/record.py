"""One request of a trace, and the file it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Rounding = Literal["ceil", "floor"]
"""Whether a prompt's last, partial block has an id of its own (`ceil`) or none (`floor`)."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and its answer, by lengths; the text itself is not in such traces."""

    name: str
    """Where it stands: the line, and for nested files the place in it."""
    arrival: float
    """Seconds since the start of the trace (of its own session where a file holds several)."""
    input_tokens: int
    """Tokens of the prompt, at least 1."""
    output_tokens: int
    """Tokens generated, at least 0."""
    blocks: tuple[int, ...] | None
    """The prompt's blocks in order, each a number that stands for the whole prefix up to its end; equal numbers
    are equal prefixes. Numbered 0, 1, ... over the file by first appearance. None: the file does not say."""
    session: str | None = None
    """The session (one agent's trace) it belongs to."""


@dataclass(frozen=True)
class RequestFile:
    """A request trace that is read as it is iterated; iterating again reads the file again."""

    path: Path
    format: str
    """`mooncake`, `agentic` or `kvassay`."""
    block_size: int
    """Tokens per block id."""
    rounding: Rounding
    _read: Callable[[], Iterator[Request]]

    def __iter__(self) -> Iterator[Request]:
        """Requests in the order of the file; `TraceError` names file, line and key of the first mistake."""
        return self._read()


def blocks_expected(tokens: int, block_size: int, rounding: Rounding) -> int:
    """Block ids a prompt of `tokens` has."""
    return -(-tokens // block_size) if rounding == "ceil" else tokens // block_size
