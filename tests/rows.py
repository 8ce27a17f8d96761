"""Hand-made result rows, for tests that need results without a replay."""

from __future__ import annotations

from typing import Any

from kvassay.measure.result import BranchResult

DENSE_BYTES = 1000.0 * 1024
SILENT: dict[str, Any] = {"task": None, "generated": "", "generated_tokens": 0}
"""What a row says under `free_tokens = 0`."""


def row(arm: str = "dense", trace: str = "t0", branch: int = 0, **changes: Any) -> BranchResult:
    """One question; dense unless changed."""
    values: dict[str, Any] = {
        "trace": trace,
        "workload": "kv_short",
        "branch": branch,
        "arm": arm,
        "query_aware": False,
        "context_tokens": 2048,
        "question_tokens": 6,
        "answer_tokens": 4,
        "nll": 0.5,
        "top1": 1.0,
        "kl": 0.0,
        "agree": 1.0,
        "task": 1.0,
        "divergence": None,
        "wrong_step": None,
        "generated": " 1234",
        "generated_tokens": 4,
        "retained_bytes": DENSE_BYTES,
        "retained_fraction": 1.0,
        "retained_bytes_scope": DENSE_BYTES,
        "retained_fraction_scope": 1.0,
        "peak_bytes": DENSE_BYTES,
        "selected_tokens": 2048.0,
        "blocks_total": 128,
        "blocks_freed": dict.fromkeys(
            ("whole_block", "per_layer_tables", "per_head_tables", "slot_reuse", "compaction"), 0.0
        ),
        "read_bytes": 900.0 * 1024,
        "read_fraction": 1.0,
        "policy_bytes": 0.0,
        "policy_seconds": 0.0,
    }
    return BranchResult(**{**values, **changes})
