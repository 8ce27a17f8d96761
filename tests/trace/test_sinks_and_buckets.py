"""Sinks in the header, and a tap whose rows are -inf where a query sees nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from kvassay.errors import TraceError
from kvassay.trace.buckets import bucket_visible
from kvassay.trace.reader import Trace
from kvassay.trace.schema import Tap
from kvassay.trace.verify import verify
from kvassay.trace.writer import TraceWriter

from . import tiny

LAYERS = tiny.LAYOUT.layers
SINKING = replace(tiny.LAYOUT, layers=(replace(LAYERS[0], sinks=True), *LAYERS[1:]))
LOGITS = (0.1, -2.0, 3.5, float(torch.tensor(1 / 3)))


def write(path: Path, sinks: dict[int, Any] | None, **changes: Any) -> Trace:
    header = tiny.header(layout=SINKING, **changes)
    with TraceWriter(path, header) as writer:
        tiny.write_rows(writer, tiny.rows_for(torch.float32))
        if sinks is not None:
            writer.set_sinks(sinks)
    return Trace.open(path)


def test_sinks_come_back_to_the_last_bit(tmp_path: Path) -> None:
    trace = write(tmp_path / "t", {0: list(LOGITS)})
    assert trace.header.sinks == {0: LOGITS}
    assert torch.tensor(trace.header.sinks[0]).tolist() == list(torch.tensor(LOGITS))
    assert tiny.make(tmp_path / "none").header.sinks == {}


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (None, "the logits of layer 0's attention sinks were never given"),
        ({0: [1.0, 2.0]}, "sinks of layer 0: 2 logits, the layout asks 4"),
        ({0: LOGITS, 1: [1.0]}, "sinks of layer 1: 1 logits, the layout asks 0"),
    ],
)
def test_sinks_must_be_those_of_the_layout(sinks: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=message):
        write(tmp_path / "t", sinks)
    assert list(tmp_path.iterdir()) == []


def test_a_header_that_lost_its_sinks_is_refused(tmp_path: Path) -> None:
    trace = write(tmp_path / "t", {0: LOGITS})
    file = trace.path / "trace.json"
    text = file.read_text()
    start = text.index('"sinks": {\n')
    file.write_text(text[:start] + '"sinks": {}' + text[text.index("}", start) + 1 :])
    with pytest.raises(TraceError, match="layer 0 has attention sinks, their logits are not there"):
        Trace.open(trace.path)


@pytest.mark.parametrize(("kind", "size"), [("bucket", None), ("lse", 4), ("bucket", 0)])
def test_size_belongs_to_buckets(kind: Any, size: int | None) -> None:
    with pytest.raises(ValidationError, match=r"size belongs to 'bucket'|greater than or equal to 1"):
        Tap(kind=kind, layer=0, size=size)


def test_a_query_sees_its_bucket_up_to_itself_and_inside_the_window() -> None:
    assert bucket_visible(3, 3, 4, None).tolist() == [
        [True] * 4,
        [True, False, False, False],
        [True, True, False, False],
    ]
    assert bucket_visible(3, 3, 4, 2).tolist() == [
        [False, False, True, True],
        [True, False, False, False],
        [True, True, False, False],
    ]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_verify_looks_at_what_a_query_sees_of_its_bucket(dtype: Any, tmp_path: Path) -> None:
    taps = (Tap(kind="bucket", layer=1, size=4, first=7),)  # 3 query heads, a window of 5
    header = tiny.header(taps=taps, dtype=dtype)
    rows = {key: x for key, x in tiny.rows_for(getattr(torch, dtype)).items() if not str(key[1])[-4:].startswith("_")}
    for name, spoil in (("sound", None), ("broken", (1, 2, 1))):
        with TraceWriter(tmp_path / name, header) as writer:
            tiny.write_rows(writer, rows)
            for segment, first, count in (("prefix", 7, 4), ("branch_000", 11, 6), ("branch_001", 11, 3)):
                scores = torch.ones(count, 3, 4)
                hidden = np.array([[c > (first + r) % 4 for c in range(4)] for r in range(count)])
                scores = scores.masked_fill(torch.from_numpy(hidden)[:, None], -torch.inf)
                if spoil and segment == "branch_000":
                    scores[spoil] = torch.nan  # position 12 sees column 0 of its bucket alone
                    scores[0, 2, 3] = torch.nan  # position 11 sees all four
                writer.segment(segment).append_tap("bucket_001", scores)
        problems = verify(tmp_path / name).problems
        assert problems == (
            []
            if spoil is None
            else [
                f"{tmp_path / name}/branch_000/tap_bucket_001.safetensors: "
                "'rows' has 1 of 72 values that are not finite"
            ]
        )
    assert Trace.open(tmp_path / "sound").prefix.tap("bucket_001").dtype is torch.float32
