"""The columns of every Parquet file of a run folder, documented: for `schema.json` in it, and for a page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from kvassay.experiment.folder import CELLS, COST, FIDELITY, LATENCY, LONG, SAMPLES, SPECULATION
from kvassay.experiment.records import record_schema
from kvassay.experiment.rows import FREED, cell_type, sample_schema
from kvassay.measure.acceptance import AcceptanceResult
from kvassay.measure.aggregate import FLIPPED
from kvassay.measure.columns import ARM, LABELS, ColumnCard, Words, words_of
from kvassay.measure.cost import CostResult
from kvassay.measure.latency import LatencyResult
from kvassay.measure.long import LongRow
from kvassay.measure.metrics import AMOUNTS, CARDS, QUALITY, RECLAIM_TEXT
from kvassay.measure.resample import LEVEL, MIN_CLUSTERS
from kvassay.measure.result import FREE_RUNNING, BranchResult, LayerFidelity

SCHEMA_VERSION = 1
QUESTIONS = "questions that all arms answered"


@dataclass(frozen=True)
class FileCard:
    """One Parquet file."""

    name: str
    row: str
    """What one row is of."""
    columns: tuple[ColumnCard, ...]


def files() -> tuple[FileCard, ...]:
    """Every Parquet file of a run folder with its columns, in their order.

    Raises `ExperimentError` for a column that nothing is said of.
    """
    return (
        FileCard(SAMPLES, "one question under one arm", tuple(_samples())),
        FileCard(CELLS, "one arm on one trace set, over the questions that all arms answered", tuple(_cells())),
        FileCard(LATENCY, "one arm on one trace set", _record(LatencyResult)),
        FileCard(COST, "one arm on one trace set on one hardware", _record(CostResult)),
        FileCard(SPECULATION, "one question, arm, mode, drafter and k", _record(AcceptanceResult)),
        FileCard(FIDELITY, "one question, arm and layer, open loop", _record(LayerFidelity)),
        FileCard(LONG, "one layer of a long row under one arm, open loop", _record(LongRow)),
    )


def schema_json() -> str:
    """The same for programs."""
    data = {
        "schema": SCHEMA_VERSION,
        "files": {
            file.name: {"row": file.row, "columns": [asdict(column) for column in file.columns]} for file in files()
        },
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _card(name: str, kind: Any, words: Words) -> ColumnCard:
    return ColumnCard(name, f"list<{kind.value_type}>" if pa.types.is_list(kind) else str(kind), *words)


def _record(kind: type[Any]) -> tuple[ColumnCard, ...]:
    return tuple(_card(field.name, field.type, words_of(kind, field.name)) for field in record_schema(kind))


def _labels() -> Iterator[ColumnCard]:
    return (_card(name, pa.string(), words) for name, words in LABELS.items())


def _samples() -> Iterator[ColumnCard]:
    yield from _labels()
    for field in sample_schema():
        mode = field.name.removeprefix(f"{FREED}_")
        freed = mode != field.name and mode in RECLAIM_TEXT
        yield _card(field.name, field.type, _freed(mode) if freed else words_of(BranchResult, field.name))


def _freed(mode: str, mean: str = "") -> Words:
    text = (
        "Blocks freed after compressing the context, as sole owner, net of the blocks that encoded segments fill"
        f"{mean}; {RECLAIM_TEXT[mode]}. Finer modes are given as the equivalent number of shared-table blocks."
    )
    return Words(
        "blocks", f"not divided (of blocks_total){', mean over questions' if mean else ''}", "higher", "measured", text
    )


def _cells() -> Iterator[ColumnCard]:
    for name, words in _cell_words():
        yield _card(name, cell_type(name, tuple(LABELS)), words)


def _cell_words() -> Iterator[tuple[str, Words]]:
    yield from LABELS.items()
    yield from _counts()
    for name in QUALITY:
        yield from _quality(name)
    for name in FLIPPED:
        yield from _flips(name)
    for name in AMOUNTS:
        card = CARDS[name]
        yield name, Words(card.unit, _over(name), card.better, card.how, _sentence(card.formula))
    peak = CARDS["peak_bytes"]
    yield peak.field, Words(peak.unit, "", peak.better, peak.how, _sentence(peak.formula))
    yield from ((f"{FREED}_{mode}", _freed(mode, ", mean over questions")) for mode in RECLAIM_TEXT)


def _counts() -> Iterator[tuple[str, Words]]:
    yield "arm", ARM
    yield "workload", words_of(BranchResult, "workload")
    yield "query_aware", words_of(BranchResult, "query_aware")
    yield "samples", Words("questions", how="given", meaning="Questions averaged over: those that every arm answered.")
    yield "contexts", Words("contexts", how="given", meaning="Contexts those questions are asked of; the clusters.")
    text = "Questions whose generated tokens differ from dense's somewhere; null if nothing was generated."
    yield "diverged", Words("questions", "not divided (of samples)", "lower", "measured", text)


def _quality(name: str) -> Iterator[tuple[str, Words]]:
    """The columns of one quality metric, with and without dense taken off."""
    card = CARDS[name]
    none = " Null if nothing was generated." if name in FREE_RUNNING else ""
    mean = Words(card.unit, _over(name), card.better, card.how, _sentence(card.formula) + none)
    yield from _spread(name, mean)
    yield (
        f"{name}_worst",
        mean._replace(
            denominator="the worst tenth of the questions, at least one",
            meaning=f"Mean of `{name}` over the questions where it is worst; without a direction, largest.",
        ),
    )
    off = mean._replace(meaning=f"`{name}` of the arm minus dense's, paired by question; 0 for dense.")
    yield from _spread(f"{name}_diff", off)
    yield (
        f"{name}_diff_worst",
        off._replace(
            denominator="the tenth of the questions where the arm loses most",
            meaning=f"Mean of the paired difference of `{name}` there; without a direction, where it grows most.",
        ),
    )
    yield (
        f"{name}_noise",
        mean._replace(
            better="none",
            meaning=f"What |{name}_diff| must exceed to mean anything: the larger of the half width of its interval "
            "and the reach of dense in another batch split; null with too few contexts.",
        ),
    )


def _spread(name: str, mean: Words) -> Iterator[tuple[str, Words]]:
    yield name, mean
    for end, word in (("low", "Lower"), ("high", "Upper")):
        text = (
            f"{word} end of the {LEVEL:.0%} bootstrap interval of `{name}`, clustered by context; null with fewer than "
            f"{MIN_CLUSTERS} contexts."
        )
        yield f"{name}_{end}", mean._replace(meaning=text)
    text = f"Cluster-robust standard error of `{name}`; null with one context, 0 where all contexts agree exactly."
    yield f"{name}_error", mean._replace(better="lower", meaning=text)


def _flips(name: str) -> Iterator[tuple[str, Words]]:
    right = f"full marks in `{name}`"
    of = "not divided (of samples)"
    yield (
        f"{name}_lost",
        Words("questions", of, "lower", "measured", f"Questions that dense has right ({right}) and the arm wrong."),
    )
    yield (
        f"{name}_won",
        Words("questions", of, "higher", "measured", f"Questions that the arm has right ({right}) and dense wrong."),
    )
    text = (
        f"Exact two-sided p of McNemar's test on `{name}_lost` and `{name}_won`, questions taken as independent; "
        "read it beside the clustered interval."
    )
    yield f"{name}_mcnemar", Words("probability", "", "none", "measured", text)


def _over(name: str) -> str:
    """The denominator of one question's number, and what the mean is over."""
    own = words_of(BranchResult, name).denominator
    return f"{own}; then {QUESTIONS}" if own else QUESTIONS


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
