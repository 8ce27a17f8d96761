from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from kvassay.errors import TraceError
from kvassay.layout.model import KV, Component, Layer, Layout
from kvassay.trace import writer as writer_module
from kvassay.trace.reader import Trace
from kvassay.trace.schema import BranchEntry, LogitsSpec, PrefixEntry, Subset, Tap, explain
from kvassay.trace.writer import TraceWriter

from . import tiny


def one_line(error: pytest.ExceptionInfo[TraceError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_an_exception_inside_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "trace", tiny.header()) as writer:
        writer.segment("prefix").append_tokens([1, 2])
        assert any(tmp_path.iterdir())
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("drop", [("prefix", 1, "v"), ("branch_001", 2, "q"), ("prefix", "lse_000", "tap")])
def test_a_missing_row_is_refused_at_the_end(tmp_path: Path, drop: tuple[str, int | str, str]) -> None:
    rows = tiny.rows_for(torch.float32)
    full = rows[drop].shape[0]
    rows[drop] = rows[drop][:-1]
    with pytest.raises(TraceError) as error, TraceWriter(tmp_path / "trace", tiny.header()) as writer:
        tiny.write_rows(writer, rows)
    assert f"got {full - 1} of {full} rows" in one_line(error)
    assert list(tmp_path.iterdir()) == []


def test_rows_that_do_not_fit_are_refused_when_they_come(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace", tiny.header()) as writer:
        prefix = writer.segment("prefix")
        for rows, message in [
            (torch.zeros(12, 2, 4), r"'k' holds 11 rows; 0 are written and 12 more came"),
            (torch.zeros(2, 4, 2), r"'k' takes rows \[2, 4\] F32, got \[2, 4, 2\] float32"),
            (torch.zeros(2, 2, 4, dtype=torch.bfloat16), "bfloat16 rows are refused"),
            (torch.zeros(2, 2, 4, dtype=torch.int64), "stored as torch.float32, got torch.int64"),
        ]:
            with pytest.raises(TraceError, match=message):
                prefix.append(0, "k", rows)
        with pytest.raises(TraceError, match="no tensor 'kk' is stored here"):
            prefix.append(0, "kk", torch.zeros(1))
        with pytest.raises(TraceError, match="no tensor 'k' is stored here"):
            prefix.append(2, "k", torch.zeros(1, 2, 4))
        with pytest.raises(TraceError, match=r"lists no tap 'lse_001'.*did you mean 'lse_000'"):
            prefix.append_tap("lse_001", torch.zeros(1, 4))
        with pytest.raises(TraceError, match="prefix: the header asks for no logits here"):
            prefix.append_logits(torch.zeros(1, 50))
        with pytest.raises(TraceError, match="prefix: token ids 3 to 50 leave the vocabulary of 50"):
            prefix.append_tokens([3, 50])
        with pytest.raises(TraceError, match="no segment 'branch_002'"):
            writer.segment("branch_002")
        tiny.write_rows(writer, tiny.rows_for(torch.float32))
    assert Trace.open(tmp_path / "trace")


def test_an_existing_path_is_kept_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    first = tiny.make(path, seed=0)
    with pytest.raises(TraceError, match="exists already"):
        tiny.make(path, seed=1)
    assert torch.equal(Trace.open(path).prefix.k(0), first.rows["prefix", 0, "k"])
    second = tiny.make(path, seed=1, overwrite=True)
    assert torch.equal(Trace.open(path).prefix.k(0), second.rows["prefix", 0, "k"])
    assert [p.name for p in tmp_path.iterdir()] == ["trace"]


def test_a_failed_overwrite_keeps_the_old_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    first = tiny.make(path)
    with pytest.raises(TraceError, match="of 11 rows"), TraceWriter(path, tiny.header(), overwrite=True):
        pass
    assert torch.equal(Trace.open(path).prefix.k(0), first.rows["prefix", 0, "k"])
    assert [p.name for p in tmp_path.iterdir()] == ["trace"]


def test_overwrite_never_removes_what_is_not_a_trace(tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.tex").write_text("years of work")
    with pytest.raises(TraceError, match="is not a trace folder; it is left alone"):
        tiny.make(folder, overwrite=True)
    assert (folder / "chapter.tex").read_text() == "years of work"


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TraceError) as error, TraceWriter(tmp_path / "trace", tiny.header()):
        pytest.fail("the space is reserved before anything is recorded")
    assert "No space left on device" in one_line(error)
    assert "bytes free" in one_line(error)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny.make(tmp_path / "trace")
    needed = sum(path.stat().st_size for path in made.path.rglob("*.safetensors"))
    asked: list[Path] = []

    def free(path: Path) -> int:
        asked.append(path)
        return needed - 1

    monkeypatch.setattr(writer_module, "free_bytes", free)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("something was written"))
    with pytest.raises(TraceError, match=f"needs {needed} bytes and {needed - 1} are free there") as error:
        tiny.make(tmp_path / "new" / "other")
    assert "other: " in one_line(error)
    assert asked == [tmp_path / "new" / "other"]
    monkeypatch.undo()
    monkeypatch.setattr(writer_module, "free_bytes", lambda path: needed)
    assert tiny.make(tmp_path / "new" / "other").path.is_dir()


def test_a_million_tokens_ask_for_all_their_bytes_and_leave_no_folder(tmp_path: Path) -> None:
    """Of the disk that is really here: one layer of 2 ** 20 tokens needs more than any has, at this many heads."""
    wide = Layer(0, 1 << 20, (Component(KV(1 << 20, 4096, 4096)),), 1.0)
    layout, prefix = Layout("wide", (wide,), 8, 256, 1 << 20), PrefixEntry(tokens=1 << 20)
    header = tiny.header(layout=layout, prefix=prefix, q_from=0, taps=(), branches=())
    with pytest.raises(TraceError, match=r"needs 5\d{16} bytes and \d+ are free there, so nothing was written"):
        TraceWriter(tmp_path / "traces" / "long", header).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_folders_made_for_a_trace_that_failed_go_with_it(tmp_path: Path) -> None:
    with pytest.raises(TraceError), TraceWriter(tmp_path / "a" / "b" / "trace", tiny.header()):
        assert (tmp_path / "a" / "b").is_dir()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes").write_text("mine")
    with pytest.raises(TraceError), TraceWriter(tmp_path / "a" / "b" / "trace", tiny.header()):
        pass
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["notes"]


def test_a_disk_that_fills_while_writing_is_one_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(TraceError) as error, TraceWriter(tmp_path / "trace", tiny.header()) as writer:
        monkeypatch.setattr(os, "pwrite", full)
        writer.segment("prefix").append_tokens([1])
    assert "tokens.safetensors: cannot write: No space left on device" in one_line(error)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(TraceError, match=r"cannot create: .*(Not a directory|File exists)") as error:
        tiny.make(tmp_path / "file" / "trace")
    one_line(error)

    real = Path.mkdir

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        if ".partial-" in self.name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        real(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", refuse)  # a root user passes every permission bit, so the refusal is staged
    with pytest.raises(TraceError, match=r"trace.*cannot create: Permission denied") as error:
        tiny.make(tmp_path / "trace")
    one_line(error)
    assert not (tmp_path / "trace").exists()


def test_sigkill_in_the_middle_leaves_nothing_at_the_path(tmp_path: Path) -> None:
    script = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        import torch
        from tests.trace import tiny
        from kvassay.trace.writer import TraceWriter
        with TraceWriter({str(tmp_path / "trace")!r}, tiny.header()) as writer:
            tiny.write_rows(writer, tiny.rows_for(torch.float32))
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not (tmp_path / "trace").exists()
    tiny.make(tmp_path / "trace")
    assert Trace.open(tmp_path / "trace")


def test_what_the_header_refuses() -> None:
    cases = [
        ({"dtype": "bfloat16"}, "bfloat16 traces are refused"),
        ({"dtype": "float64"}, "dtype: Input should be 'float32' or 'float16'"),
        ({"q_from": 12}, "q_from 12 lies beyond the prefix of 11 tokens"),
        ({"taps": (Tap(kind="lse", layer=3),)}, "tap lse_003: the layout has 3 layers"),
        ({"taps": (Tap(kind="lse", layer=0),) * 2}, "a tap is listed twice"),
        ({"schema_version": 2}, "schema_version"),
        ({"dtpye": "float32"}, r"unknown key 'dtpye' \(did you mean 'dtype'\?\)"),
    ]
    for changes, message in cases:
        with pytest.raises(ValidationError) as error:
            tiny.header(**changes)
        said = explain(error.value)
        assert "\n" not in said
        assert re.search(message, said)
    with pytest.raises(ValidationError, match="question_tokens 4 exceeds the branch's 3 tokens"):
        BranchEntry(tokens=3, question_tokens=4)
    with pytest.raises(ValidationError, match="k belongs to 'topk'"):
        LogitsSpec(kind="full", k=3)


def test_a_subset_names_every_layer_of_the_layout() -> None:
    assert tiny.header(subset=Subset(layers=(4, 7, 9))).subset == Subset(layers=(4, 7, 9))
    with pytest.raises(ValidationError, match="subset names 2 layers, the layout has 3"):
        tiny.header(subset=Subset(layers=(4, 7)))
