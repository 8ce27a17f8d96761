"""What every number in a result file counts: unit, denominator, direction, measured or modelled.

Words that the records' own docstrings and the metric cards do not hold are here, field by field; what a field means
is read off its docstring. A field without an entry is an error, so that none goes undocumented.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kvassay.errors import ExperimentError
from kvassay.measure.acceptance import AcceptanceResult
from kvassay.measure.cost import CostResult
from kvassay.measure.latency import LatencyResult
from kvassay.measure.long import LongRow
from kvassay.measure.metrics import CARDS
from kvassay.measure.result import BranchResult, LayerFidelity
from kvassay.measure.statistics import Better

How = Literal["measured", "modelled", "given"]
"""`given`: a name, a setting, or a property of the text; nothing was measured."""


@dataclass(frozen=True)
class ColumnCard:
    """One column of a result file."""

    name: str
    type: str
    """As Arrow writes it."""
    unit: str
    """Empty for names and texts."""
    denominator: str
    """What the number is divided by, or a mean of; empty for plain amounts."""
    better: Better
    how: How
    meaning: str


class Words(NamedTuple):
    """What is said of one field; `better` and `unit` of metrics come from their cards."""

    unit: str = ""
    denominator: str = ""
    better: Better = "none"
    how: How = "measured"
    meaning: str = ""
    """Only where the field has no docstring, or it says less."""


def _given(meaning: str = "", unit: str = "") -> Words:
    return Words(unit, how="given", meaning=meaning)


LABELS: dict[str, Words] = {
    "model": _given("Short name of the model."),
    "trace_set": _given("Label of the workload with its length and parameters."),
}
"""Leading columns that say which model and trace set a row is of."""
ARM = _given("Label of the arm: policy, parameters, budget, prefill mode.")
CONTEXT = _given("Tokens of the context that was compressed.", "tokens")
QUESTION: dict[str, Words] = {
    "trace": _given(),
    "workload": _given("Name of the workload."),
    "branch": _given(unit="ordinal"),
    "arm": ARM,
    "context_tokens": CONTEXT,
}
"""Columns that say which question under which arm."""

SCORED, DENSE_THEN = "scored answer tokens", "dense's at the same moment"
SAMPLE: dict[str, Words] = {
    **QUESTION,
    "query_aware": _given(),
    "question_tokens": _given("Tokens of the question.", "tokens"),
    "answer_tokens": _given("Tokens of the recorded answer.", "tokens"),
    "nll": Words(denominator=SCORED),
    "top1": Words(denominator=SCORED),
    "kl": Words(denominator=SCORED),
    "agree": Words(denominator=SCORED),
    "task": Words(denominator="most points the answer can have"),
    "divergence": Words("token, 0-based", better="higher"),
    "wrong_step": Words("step, 0-based", better="higher"),
    "generated": Words(),
    "generated_tokens": Words(),
    "retained_bytes": Words(),
    "retained_fraction": Words(denominator=DENSE_THEN),
    "retained_bytes_scope": Words(),
    "retained_fraction_scope": Words(
        denominator=f"{DENSE_THEN}, in the same layers",
        meaning="`retained_bytes_scope` / dense's in the same layers; lower is better.",
    ),
    "peak_bytes": Words(),
    "selected_tokens": Words(
        denominator="tokens processed after the context, KV heads, layers that read a cache in scope"
    ),
    "blocks_total": Words(),
    "read_bytes": Words(denominator="teacher-forced tokens after the context"),
    "read_fraction": Words(denominator="dense's for the same token"),
    "read_bytes_growing": Words("bytes per decoded token", "teacher-forced tokens after the context", "lower"),
    "policy_bytes": Words(),
    "artefact_bytes": Words("bytes", better="lower"),
    "index_bytes": Words("bytes", better="lower"),
    "index_read_bytes": Words("bytes per decoded token", "teacher-forced tokens after the context", "lower"),
    "pooled_bytes": Words("bytes", better="lower"),
    "prefill": _given(),
    "ended": Words(),
    "policy_seconds": Words(),
    "facts": Words(),
    "kept": Words("fraction", "tokens of the stretch x KV heads of the scoped layers"),
    "context_sha256": _given(),
    "question_sha256": _given(),
}
SECONDS = "wall seconds per decoded token"
LATENCY: dict[str, Words] = {
    **LABELS,
    "arm": ARM,
    "context_tokens": Words("tokens", "contexts timed", how="given"),
    "rounds": _given(unit="rounds"),
    "attention_seconds": Words(SECONDS, "tokens decoded", "lower"),
    "attention_low": Words(SECONDS, "tokens decoded", "lower", meaning="First quartile of the same."),
    "attention_high": Words(SECONDS, "tokens decoded", "lower", meaning="Third quartile of the same."),
    "policy_seconds": Words(SECONDS, "tokens decoded", "lower"),
    "dense_seconds": Words(SECONDS, "tokens decoded"),
    "read_bytes": Words("bytes per decoded token", "tokens decoded", "lower"),
    "flops": Words("operations per decoded token", "tokens decoded", "lower"),
    "gigabytes_per_second": Words("1e9 bytes per second", "attention_seconds", "higher"),
    "bandwidth_fraction": Words(
        "fraction",
        "read bandwidth measured in the same stage",
        "higher",
        meaning="`gigabytes_per_second` / the read bandwidth measured in the same stage.",
    ),
    "matrix_fraction": Words("fraction", "matrix rate measured in the same stage", "higher"),
    "hardware": _given(),
    "load_average": Words("processes", "one minute", "lower"),
    "how": _given("Always `measured`."),
}
COST: dict[str, Words] = {
    **LABELS,
    "arm": ARM,
    "hardware": _given(),
    "batch": _given(unit="requests"),
    "context_tokens": CONTEXT,
    "seconds_per_token": Words("seconds per decode step", "decode steps", "lower", "modelled"),
    "dense_seconds_per_token": Words("seconds per decode step", "decode steps", how="modelled"),
    "calibration_error": Words("fraction", "the measured time", "lower", "modelled"),
    "how": _given("Always `modelled`."),
}
SPECULATION: dict[str, Words] = {
    **QUESTION,
    "k": _given(unit="tokens"),
    "rounds": Words("forward passes", better="lower"),
    "num_drafts": Words("drafts"),
    "num_draft_tokens": Words("tokens", meaning="Draft tokens proposed."),
    "num_accepted_tokens": Words(
        "tokens", better="higher", meaning="Draft tokens accepted, the target's own left out."
    ),
    "num_accepted_tokens_per_pos": Words("drafts, by draft position", better="higher"),
    "num_draft_tokens_per_pos": Words("drafts, by draft position"),
    "reached_per_pos": Words("drafts, by draft position", better="higher"),
    "overlap_per_pos": Words(
        "sum of probabilities, by draft position", "not divided; by reached_per_pos: a mean", "higher"
    ),
    "mode": _given(),
    "drafter": _given(),
    "target": _given(),
}
QUERIES, HEADS = "the branch's recorded queries", "the branch's recorded queries and query heads"
FIDELITY: dict[str, Words] = {
    "trace": _given("Name of the trace folder (one context)."),
    "workload": _given("Name of the workload."),
    "branch": _given("Ordinal of the question within its context.", "ordinal"),
    "arm": ARM,
    "layer": _given("Index of the layer.", "ordinal"),
    "output_error": Words("fraction", "norm of dense's output", "lower"),
    "retained_mass": Words("fraction", HEADS, "higher"),
    "in_scope": _given(),
    "read_bytes": Words("bytes per query", QUERIES, "lower"),
    "scan_bytes": Words("bytes per query", QUERIES, "lower"),
    "dense_bytes": Words("bytes per query", QUERIES),
    "head_errors": Words("fraction, by query head", "norm of dense's output of that head", "lower"),
}
LONG_SECONDS = "wall seconds of this CPU"
LONG: dict[str, Words] = {
    "source": _given(),
    "statistics": _given(),
    "row": _given(),
    "tokens": _given(unit="tokens"),
    "layer": _given("Index of the layer.", "ordinal"),
    "kind": _given(),
    "layers_like_it": _given(unit="layers"),
    "layers_replayed": _given("Layers of this kind that were replayed; evenly spaced by depth.", "layers"),
    "arm": ARM,
    "judges": _given(),
    "retained_bytes": Words("bytes", better="lower"),
    "retained_fraction": Words("fraction", "dense's of the same layer", "lower"),
    "sliding_bytes": Words("bytes", how="modelled"),
    "blocks_total": Words("blocks"),
    "blocks_freed_layer": Words("blocks", "not divided (of blocks_total)", "higher"),
    "blocks_freed_head": Words("blocks", "not divided (of blocks_total)", "higher"),
    "read_bytes": Words("bytes per query", QUERIES, "lower"),
    "read_fraction": Words("fraction", "dense's for the same queries", "lower"),
    "scan_bytes": Words("bytes per query", QUERIES, "lower"),
    "policy_bytes": Words("bytes", better="lower"),
    "decide_seconds": Words(LONG_SECONDS, better="lower"),
    "summarize_seconds": Words(LONG_SECONDS, better="lower"),
    "select_seconds": Words(LONG_SECONDS, "queries of the question", "lower"),
    "peak_rss_bytes": Words("bytes", better="lower"),
    "output_error": Words("fraction", "norm of dense's output", "lower"),
    "retained_mass": Words("fraction", HEADS, "higher"),
    "target_recall": Words("fraction", "(query head, query) pairs with a target", "higher"),
}
RECORDS: dict[type[Any], dict[str, Words]] = {
    BranchResult: SAMPLE,
    LatencyResult: LATENCY,
    CostResult: COST,
    AcceptanceResult: SPECULATION,
    LayerFidelity: FIDELITY,
    LongRow: LONG,
}


def words_of(kind: type[Any], field: str) -> Words:
    """What is said of a field of a record; a metric's unit, direction and `how` are its card's.

    Raises `ExperimentError` for a field that nothing is said of: a new one needs a line here.
    """
    table = RECORDS[kind]
    if field not in table:
        raise ExperimentError(f"{kind.__name__}.{field} has no unit, denominator and direction in measure/columns.py")
    found = table[field]
    card = CARDS.get(field) if kind is BranchResult else None
    if card is not None:
        found = found._replace(unit=card.unit, better=card.better, how=card.how)
    if not found.meaning:
        found = found._replace(meaning=_notes(kind).get(field, ""))
    if not found.meaning:
        raise ExperimentError(f"{kind.__name__}.{field} has neither a docstring nor a meaning in measure/columns.py")
    return found


def _notes(kind: type[Any]) -> Mapping[str, str]:
    """The string under each field of a dataclass and of what it derives from."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for field, note in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = note.value if isinstance(note, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    found[field.target.id] = " ".join(text.value.split())
    return found
