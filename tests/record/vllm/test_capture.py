from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvassay.errors import RecordError
from kvassay.record.vllm.capture import Capture, CaptureWriter, Cost, Run, top_logits

from .steps import arrived, head_of, step, write


def test_what_is_written_is_read(tmp_path: Path) -> None:
    head = head_of([0, 3], kv_heads=(1,), sinks={3: (0.5,)})
    steps = [
        step(0, ("a", 0, [5, 6]), tables={"a": ((1,),)}, arrived=(arrived("a", [5, 6]),)),
        step(1, ("a", 2, [7]), tables={"a": ((1,),)}, seconds=0.5, recording_seconds=0.25),
    ]
    found = write(tmp_path / "c", head, steps)
    assert (found.head, found.steps) == (head, tuple(steps))
    assert found.rows(Run(0, 1, 1), "slots.0").tolist() == [5]
    size = sum(path.stat().st_size for path in (tmp_path / "c").glob("*.safetensors"))
    assert found.cost() == Cost(steps=2, seconds=0.5, recording_seconds=0.25, nbytes=size)
    assert found.cost().overhead == 1.0  # 0.25 s on top of the engine's own 0.25 s


def test_a_step_cut_off_in_writing_does_not_count(tmp_path: Path) -> None:
    made = step(0, ("a", 0, [5]), tables={"a": ((1,),)}, arrived=(arrived("a", [5]),))
    write(tmp_path / "c", head_of([0]), [made])
    lines = tmp_path / "c" / "steps.jsonl"
    lines.write_text(lines.read_text() + '{"step":1,"tab')
    assert Capture(tmp_path / "c").steps == (made,)
    lines.write_text('{"step":1,"tab\n')
    with pytest.raises(RecordError, match="line 1"):
        Capture(tmp_path / "c")


def test_a_folder_holds_one_capture(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"no capture\.json in it"):
        Capture(tmp_path)
    CaptureWriter(tmp_path, head_of([0]))
    assert Capture(tmp_path).steps == ()
    with pytest.raises(RecordError, match="holds a capture already"):
        CaptureWriter(tmp_path, head_of([0]))


def test_top_logits() -> None:
    found = top_logits(torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 5.0]]), 2)
    assert found["logits.values"][0].tolist() == [3.0, 2.0]
    assert found["logits.ids"][0].tolist() == [1, 2]
    expected = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 5.0]]).exp().sum(-1).log()
    torch.testing.assert_close(found["logits.logsumexp"], expected)
