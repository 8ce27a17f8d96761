"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvassay.trace.requests.record import Request


@dataclass(eq=False)
class Flight:
    """What the scheduler knows of a request; times are seconds since the first arrival of the trace."""

    request: Request
    number: int
    """Ordinal in the trace."""
    arrival: float
    output: int
    """Tokens to generate, at least 1: the end of a prefill samples one."""
    computed: int = 0
    """Tokens whose K and V are in the cache (or were let go by a policy since)."""
    generated: int = 0
    windows: int = 0
    """Intervals of generated tokens that a policy has compressed."""
    let_go: int = 0
    """Tokens of those whose blocks it gave back."""
    units: int = 0
    """Units that have slots."""
    prefilled: bool = False
    """Whether all tokens known at the last admission are computed."""
    admitted: bool = False
    cached: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    first_token: float | None = None
    finished: float | None = None
    preemptions: int = 0
    lost: int = 0
    """Tokens it had computed when it was preempted last."""
    recomputed: int = 0
    """Tokens computed again after preemptions."""

    @property
    def name(self) -> str:
        """The manager's name for it."""
        return str(self.number)

    @property
    def tokens(self) -> int:
        """Tokens known: the prompt and what was generated."""
        return self.request.input_tokens + self.generated

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None with fewer than two tokens."""
        if self.finished is None or self.first_token is None or self.output < 2:
            return None
        return (self.finished - self.first_token) / (self.output - 1)
