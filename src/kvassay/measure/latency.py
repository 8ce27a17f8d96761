"""The record of measured decode time: one arm on one context, beside dense in the same interleaved rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from kvassay.errors import ExperimentError


@dataclass(frozen=True)
class LatencyResult:
    """Decoding one token over all layers on the arm's own cache, with the same in-place kernel for every arm.

    Times are wall seconds per decoded token on this very machine, batch 1, caches cold; lower is better. They say
    nothing of another machine.
    """

    model: str
    trace_set: str
    arm: str
    context_tokens: int
    """Tokens of the context that was compressed, mean over the contexts timed."""
    rounds: int
    """Rounds over all arms that the times are the median and quartiles of, warm-up left out."""
    attention_seconds: float
    """Median over rounds of the attention of one token, all layers, in place over slots, codes and bias."""
    attention_low: float
    """First quartile."""
    attention_high: float
    """Third quartile."""
    policy_seconds: float
    """What the policy itself does per decoded token, beside the attention: choosing what to read (its scan),
    summaries, observing, deciding, encoding and copying; work that comes every n tokens is spread over them."""
    dense_seconds: float
    """`attention_seconds` of dense in the same rounds."""
    read_bytes: float
    """Bytes that the kernel reads for one token as this machine holds them: K and V, codes with their metadata,
    bias. Not the policy's scan."""
    flops: float
    """Floating-point operations of the attention's QK and PV products for one token."""
    gigabytes_per_second: float
    """`read_bytes` / `attention_seconds` / 1e9."""
    bandwidth_fraction: float
    """That / the read bandwidth measured in the same stage."""
    matrix_fraction: float
    """`flops` / `attention_seconds` / the matrix rate measured in the same stage."""
    hardware: str
    """Processor and threads."""
    load_average: float | None = None
    """Of the machine over the minute before, processes; above its number of CPUs others slowed the times down."""
    how: Literal["measured"] = "measured"

    @property
    def fraction(self) -> float:
        """Attention time / dense's; lower is better, 1 for dense."""
        return self.attention_seconds / self.dense_seconds

    @property
    def total_fraction(self) -> float:
        """Attention and policy time / dense's attention time; lower is better."""
        return (self.attention_seconds + self.policy_seconds) / self.dense_seconds


class Quartiles(NamedTuple):
    """Median and quartiles of repeated times."""

    low: float
    median: float
    high: float


def quartiles(samples: Sequence[float]) -> Quartiles:
    """Median and quartiles, linear between samples; `ExperimentError` if there are none."""
    if not samples:
        raise ExperimentError("no round was timed")
    return Quartiles(*(float(value) for value in np.percentile(samples, (25, 50, 75))))
