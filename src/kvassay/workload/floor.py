"""The dense floor: what the model must manage with its whole cache before a policy may be judged on a workload.

Below the floor a policy can lose nothing, so a comparison there says nothing. Floors are for scored answer
tokens, teacher-forced. They lie clearly above chance: a digit drawn blindly is right 10 % of the time (NLL
2.30), a word of the lexicon 0.1 % (6.7).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvassay.errors import WorkloadError, did_you_mean


@dataclass(frozen=True)
class DenseFloor:
    """Least top-1 share (0..1) and most NLL (nats per scored token) of the dense model, means over samples."""

    min_top1: float
    max_nll: float


FLOORS: Mapping[str, DenseFloor] = MappingProxyType(
    {
        "needle_single": DenseFloor(0.60, 1.5),
        "needle_multikey": DenseFloor(0.50, 1.8),
        "needle_generated": DenseFloor(0.50, 1.8),
        "copy": DenseFloor(0.50, 2.5),
        "kv_short": DenseFloor(0.50, 1.8),
        "kv_uuid": DenseFloor(0.50, 1.8),
        "tracking": DenseFloor(0.50, 1.8),
        "words": DenseFloor(0.50, 3.0),
        "prose": DenseFloor(0.25, 4.5),
        "prose_numbered": DenseFloor(0.25, 4.5),
        "chain": DenseFloor(0.40, 2.0),
        "scratchpad": DenseFloor(0.40, 2.0),
        "jsonl": DenseFloor(0.25, 4.0),
    }
)


def floor_of(workload: str) -> DenseFloor:
    """The declared floor of a workload. Raises `WorkloadError` for an unknown name."""
    if workload not in FLOORS:
        raise WorkloadError(f"no dense floor for workload '{workload}'{did_you_mean(workload, FLOORS)}")
    return FLOORS[workload]


def check_floor(
    workload: str, length: int, dense_top1: float, dense_nll: float, *, model: str = "the dense model"
) -> None:
    """Refuse a workload at a length where the dense model is below its floor (NaN counts as below).

    `dense_top1` is a share (0..1), `dense_nll` in nats, both means over the scored answer tokens.
    """
    floor = floor_of(workload)
    if dense_top1 >= floor.min_top1 and dense_nll <= floor.max_nll:
        return
    raise WorkloadError(
        f"workload '{workload}' is refused at length {length}: {model} reaches top-1 {dense_top1:.3f} and NLL "
        f"{dense_nll:.3f} on answer tokens, the floor is at least {floor.min_top1:.2f} and at most {floor.max_nll:.2f}"
    )
