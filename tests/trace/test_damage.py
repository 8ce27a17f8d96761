from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvassay.errors import KvassayError, TraceError
from kvassay.trace.files import sha256_file
from kvassay.trace.reader import Trace
from kvassay.trace.verify import verify

from . import corrupt, tiny


@pytest.mark.parametrize("name", corrupt.STRUCTURE)
def test_open_refuses_a_damaged_trace_on_one_line(made: tiny.Made, name: str) -> None:
    damage, message = corrupt.STRUCTURE[name]
    damage(made.path)
    with pytest.raises(TraceError, match=message) as error:
        Trace.open(made.path)
    assert "\n" not in str(error.value)
    assert str(made.path) in str(error.value)
    with pytest.raises(TraceError, match=message):
        verify(made.path)


def test_verify_reads_the_hash_and_the_bytes(made: tiny.Made) -> None:
    seen: list[int] = []
    report = verify(made.path, seen.append)
    assert report.ok
    sizes = [entry.bytes for entry in Trace.open(made.path).header.shards.values()]
    assert (report.shards, report.bytes, sum(seen)) == (len(sizes), sum(sizes), sum(sizes))


def test_one_flipped_bit_is_found(made: tiny.Made) -> None:
    corrupt.flip_byte(made.path)
    assert Trace.open(made.path)
    (problem,) = verify(made.path).problems
    assert problem.startswith(str(made.path / corrupt.SHARD))
    assert "sha256 is" in problem


def rewrite(path: Path, shard: str, offset_from_end: int, data: bytes) -> None:
    """Overwrite bytes and make trace.json agree, so that only the values are wrong."""
    with (path / shard).open("r+b") as file:
        file.seek(-offset_from_end, 2)
        file.write(data)
    found = sha256_file(path / shard)
    corrupt.edit(path, lambda data: data["shards"][shard].update(sha256=found))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_counted(made: tiny.Made, value: float) -> None:
    rewrite(made.path, corrupt.SHARD, 8, np.full(2, value, "<f4").tobytes())
    assert verify(made.path).problems == [f"{made.path / corrupt.SHARD}: 'q' has 2 of 64 values that are not finite"]


@pytest.mark.parametrize(("ids", "said"), [([50], "0 to 50"), ([-1], "-1 to 7")])
def test_token_ids_outside_the_vocabulary(made: tiny.Made, ids: list[int], said: str) -> None:
    rewrite(made.path, "branch_001/tokens.safetensors", 4, np.asarray(ids, "<i4").tobytes())
    (problem,) = verify(made.path).problems
    assert f"token ids {said} leave the vocabulary of 50" in problem


def test_a_file_nobody_listed(made: tiny.Made) -> None:
    (made.path / "prefix/notes.txt").write_text("hello")
    assert verify(made.path).problems == [f"{made.path / 'prefix/notes.txt'}: not part of the trace"]


def test_a_trace_may_be_moved_and_linked_to(made: tiny.Made, tmp_path: Path) -> None:
    digest = Trace.open(made.path).digest
    shutil.move(made.path, tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert Trace.open(tmp_path / "link").digest == digest
    assert verify(tmp_path / "link").ok


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_to_a_header_is_a_trace_error_or_harmless(made: tiny.Made, data: st.DataObject) -> None:
    file = made.path / data.draw(st.sampled_from(["trace.json", corrupt.SHARD, "blocks/block_4.json"]))
    if not (made.path / "blocks").exists():
        Trace.open(made.path).reblock(4)
    good = file.read_bytes()
    at = data.draw(st.integers(0, min(len(good), 4000) - 1))
    cut = data.draw(st.integers(0, 3))
    bad = good[:at] + data.draw(st.binary(max_size=3)) + good[at + cut :]
    file.write_bytes(bad)
    try:
        report = verify(made.path)
        assert not report.ok or bad == good or file.suffix == ".json"
    except KvassayError as error:
        assert "\n" not in str(error)
    finally:
        file.write_bytes(good)
