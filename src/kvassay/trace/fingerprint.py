"""A small JSON by which two recordings of one recipe are compared, since floats differ a little between CPUs.

Per tensor it holds the norm, four projections r' X u with fixed random signs r (tokens) and u (elements), and a
few sampled elements. A projection moves by about the norm of the change, whichever row changed, so one wrong
row among thousands shows although it hardly moves the norm.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import JsonValue, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from kvassay.errors import TraceError
from kvassay.trace.files import os_errors
from kvassay.trace.reader import Branch, Segment, Trace
from kvassay.trace.schema import PREFIX, TraceHeader, explain
from kvassay.trace.shapes import SELECTION

VERSION = 1
PROJECTIONS = 4
CHUNK_TOKENS = 1024
SAMPLED_ELEMENTS = 4
TOLERANCE = 1e-3
"""Default of `compare`: of a tensor's norm. Other CPUs, threads and prefill chunks move a float32 row by 1e-6 to
1e-5 of it; float16 rounds at 5e-4."""


class TensorPrint(TypedDict):
    """Fingerprint of one tensor."""

    norm: float
    projections: list[float]
    samples: dict[str, list[float]]


class GreedyPrint(TypedDict):
    """First choice after each token of a branch, its lead over the second, and the largest logit."""

    ids: list[int]
    margins: list[float]
    peak: float


class Fingerprint(TypedDict):
    """Fingerprint of a trace: plain JSON."""

    version: int
    model: dict[str, JsonValue]
    recipe: dict[str, JsonValue]
    dtype: str
    tokens: dict[str, int]
    """Segment -> number of tokens."""
    token_ids: dict[str, str]
    """Segment -> sha256 of its token ids as little-endian int32."""
    rows: dict[str, dict[str, TensorPrint]]
    """`prefix/layer_000`, and `branches/layer_000` for all branches one after the other -> tensor -> print."""
    greedy: dict[str, GreedyPrint]
    """Branch -> first choices; empty if no logits are stored."""


def fingerprint(trace: Trace) -> Fingerprint:
    """The fingerprint of a trace; reads every K, V and Q row once, in chunks."""
    header = trace.header
    logits = () if header.logits is None else trace.branches
    return {
        "version": VERSION,
        "model": header.model.model_dump(mode="json"),
        "recipe": header.recipe.model_dump(mode="json"),
        "dtype": header.dtype,
        "tokens": {segment.name: segment.tokens for segment in trace.segments},
        "token_ids": {segment.name: _hash_ids(segment) for segment in trace.segments},
        "rows": {
            where: {name: _print_rows(parts) for name, parts in tensors.items()}
            for where, tensors in _layer_tensors(trace).items()
        },
        "greedy": {branch.name: _greedy(branch) for branch in logits},
    }


def _hash_ids(segment: Segment) -> str:
    return hashlib.sha256(segment.token_ids.numpy().astype("<i4").tobytes()).hexdigest()


def _layer_tensors(trace: Trace) -> dict[str, dict[str, list[torch.Tensor]]]:
    found: dict[str, dict[str, list[torch.Tensor]]] = {}
    for path, specs in trace.shapes.items():
        segment, file = path.removesuffix(".safetensors").split("/")
        if not file.startswith("layer_"):
            continue
        tensors = found.setdefault(f"{segment if segment == PREFIX else 'branches'}/{file}", {})
        # A near tie lets two machines select apart; what a selection re-derives from is here.
        for name in (name for name in specs if name != SELECTION):
            tensors.setdefault(name, []).append(trace.tensor(path, name))
    return found


def _print_rows(parts: Sequence[torch.Tensor]) -> TensorPrint:
    """Print of tensors [tokens, ...] of one row shape, taken one after the other."""
    total, width = sum(len(part) for part in parts), parts[0][0].numel()
    left, right = signs(total, seed=1), signs(width, seed=2)
    sampled = sorted({0, total // 2, total - 1})
    samples: dict[str, list[float]] = {}
    square, row = 0.0, 0
    sums = np.zeros(PROJECTIONS)
    for chunk in (chunk for part in parts for chunk in part.split(CHUNK_TOKENS)):
        rows = chunk.double().reshape(-1, width).numpy()
        square += float(np.square(rows).sum())
        sums += np.einsum("tp,tp->p", left[row : row + len(rows)], rows @ right)
        for at in (at for at in sampled if row <= at < row + len(rows)):
            samples[str(at)] = [_short(x) for x in rows[at - row, :SAMPLED_ELEMENTS].tolist()]
        row += len(rows)
    return {"norm": _short(square**0.5), "projections": [_short(x) for x in sums.tolist()], "samples": samples}


def signs(count: int, seed: int) -> np.ndarray[Any, Any]:
    """float64 [count, PROJECTIONS] of +1 and -1 from Philox's raw bits, which numpy keeps stable over versions."""
    raw = np.random.Philox(key=seed).random_raw(count)
    bits = (raw[:, None] >> np.arange(PROJECTIONS, dtype=np.uint64)) & np.uint64(1)
    return bits.astype(np.float64) * 2 - 1


def _greedy(branch: Branch) -> GreedyPrint:
    values = branch.top_two()
    # With k=1 the runner-up is unknown; a margin of 0 lets such a row differ.
    margins = (values[:, 0] - values[:, 1]).tolist() if values.shape[1] > 1 else [0.0] * len(values)
    return {
        "ids": branch.greedy_ids.tolist(),
        "margins": [_short(x) for x in margins],
        "peak": _short(float(values.abs().max())),
    }


def _short(value: float) -> float:
    return float(f"{value:.7g}")


def compare(a: Fingerprint, b: Fingerprint, tolerance: float = TOLERANCE) -> list[str]:
    """Differences of `b` from `a`, one line each; empty if they agree.

    Token ids, model, recipe, dtype and shapes must be equal; norms, projections and samples may differ by
    `tolerance` of the tensor's norm; greedy ids may differ only where the recorded lead of the first choice is
    within `tolerance` of the largest logit.
    """
    exact: list[tuple[str, object, object]] = [
        ("version", a["version"], b["version"]),
        ("model", a["model"], b["model"]),
        ("recipe", a["recipe"], b["recipe"]),
        ("dtype", a["dtype"], b["dtype"]),
        ("tokens", a["tokens"], b["tokens"]),
    ]
    found = [f"{key}: {x} became {y}" for key, x, y in exact if x != y]
    if a["tokens"] != b["tokens"]:
        return found
    found += [f"{name}: token ids differ" for name, ids in a["token_ids"].items() if b["token_ids"].get(name) != ids]
    for where in sorted({*a["rows"], *b["rows"]}):
        ours, theirs = a["rows"].get(where, {}), b["rows"].get(where, {})
        if set(ours) != set(theirs):
            found.append(f"{where}: tensors {sorted(ours)} became {sorted(theirs)}")
            continue
        for name in ours:
            found += [f"{where} '{name}': {line}" for line in _compare_tensor(ours[name], theirs[name], tolerance)]
    if set(a["greedy"]) != set(b["greedy"]):
        return [*found, "logits are stored in one of the two only"]
    for name, ids in a["greedy"].items():
        found += [f"{name}: {line}" for line in _compare_greedy(ids, b["greedy"][name], tolerance)]
    return found


def _compare_tensor(a: TensorPrint, b: TensorPrint, tolerance: float) -> list[str]:
    allowed = tolerance * a["norm"]
    # What may differ by `allowed` in norm may differ by more than that in one projection: 4 sigma of a random change.
    checks = [("norm", a["norm"], b["norm"], allowed)]
    checks += [
        (f"projection {i}", x, y, 4 * allowed)
        for i, (x, y) in enumerate(zip(a["projections"], b["projections"], strict=True))
    ]
    for row, values in a["samples"].items():
        for i, (x, y) in enumerate(zip(values, b["samples"].get(row, []), strict=False)):
            checks.append((f"row {row} element {i}", x, y, allowed))
    return [
        f"{what} {x:.7g} became {y:.7g} (allowed {limit:.2g})"
        for what, x, y, limit in checks
        if not abs(x - y) <= limit
    ][:1]


def _compare_greedy(a: GreedyPrint, b: GreedyPrint, tolerance: float) -> list[str]:
    tie = tolerance * a["peak"]
    flips = [
        row
        for row, (x, y, lead) in enumerate(zip(a["ids"], b["ids"], a["margins"], strict=False))
        if x != y and lead > tie
    ]
    if not flips:
        return []
    row = flips[0]
    return [f"{len(flips)} greedy ids differ, first after token {row}: {a['ids'][row]} became {b['ids'][row]}"]


def save_recipe(trace: Trace, path: str | Path) -> None:
    """Write what `reproduce` needs: the header without shards, and the fingerprint. OSError becomes TraceError."""
    header = trace.header.model_copy(update={"shards": {}})
    data = {"header": json.loads(header.model_dump_json()), "fingerprint": fingerprint(trace)}
    with os_errors(Path(path), "write"):
        Path(path).write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")


def load_recipe(path: str | Path) -> tuple[TraceHeader, Fingerprint]:
    """Header to record again and fingerprint to compare with, from a recipe file or from a trace folder."""
    if Path(path).is_dir():
        trace = Trace.open(path)
        return trace.header.model_copy(update={"shards": {}}), fingerprint(trace)
    with os_errors(Path(path), "read"):
        text = Path(path).read_text(encoding="utf-8")
    try:
        data = json.loads(text)
        parts = data["header"], data["fingerprint"]
    except (ValueError, TypeError, KeyError) as error:
        raise TraceError(f"{path}: not a recipe file with 'header' and 'fingerprint': {error}") from error
    try:
        header = TraceHeader.model_validate_json(json.dumps(parts[0]))
        expected = TypeAdapter(Fingerprint).validate_python(parts[1])
    except ValidationError as error:
        raise TraceError(f"{path}: {explain(error)}") from error
    if expected["version"] != VERSION:
        raise TraceError(f"{path}: fingerprint version {expected['version']}, this kvassay reads {VERSION}")
    return header, expected
