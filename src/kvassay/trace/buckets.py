"""Buckets of consecutive positions: which of its own bucket's keys a query sees."""

from __future__ import annotations

from typing import Any

import numpy as np


def bucket_visible(first: int, rows: int, size: int, window: int | None) -> np.ndarray[Any, Any]:
    """bool [rows, size]: whether the query at position `first + row` sees column c of its bucket.

    Buckets are anchored at position 0; a key is seen up to the query itself and inside `window` (the query's own
    token included; None: no window).
    """
    positions = first + np.arange(rows)[:, None]
    distance = positions % size - np.arange(size)
    return (distance >= 0) & (distance < (size if window is None else window))
