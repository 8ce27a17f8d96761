"""What the log shows: an edit, a removal, another order, and with a known head also a cut-off end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvassay.errors import GateError
from kvassay.gate.chain import BEGIN, Entry, append, dump, make_entry, read_log, verify


def add(path: Path, number: int) -> Entry:
    return append(
        path,
        time=f"2026-01-0{number}T00:00:00+00:00",
        gate="g",
        file="g.toml",
        sha256=str(number) * 64,
        kvassay="0.1",
        commit=None,
    )


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    for number in (1, 2, 3):
        add(path, number)
    return path


def test_every_entry_has_the_hash_of_the_one_before(log: Path) -> None:
    first, second, third = verify(log)
    assert [entry.number for entry in (first, second, third)] == [1, 2, 3]
    assert (first.previous, second.previous, third.previous) == (BEGIN, first.hash, second.hash)
    fields = {key: value for key, value in json.loads(log.read_text().splitlines()[1]).items() if key != "hash"}
    assert hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest() == second.hash


def edited(lines: list[str]) -> list[str]:
    return [lines[0], lines[1].replace("2026-01-02", "2025-01-02"), lines[2]]


def rehashed(lines: list[str]) -> list[str]:
    data = json.loads(lines[1])
    data.pop("hash")
    data["sha256"] = "f" * 64
    return [lines[0], dump((make_entry(**data),)).strip(), lines[2]]


TAMPERED: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "edited": (edited, "line 2: was edited"),
    "edited and hashed anew": (rehashed, "line 3: the chain is broken"),
    "removed": (lambda lines: [lines[0], lines[2]], "line 2: the chain is broken"),
    "first removed": (lambda lines: lines[1:], "line 1: the chain is broken"),
    "reordered": (lambda lines: [lines[1], lines[0], lines[2]], "line 1: the chain is broken"),
    "doubled": (lambda lines: [*lines, lines[2]], "line 4: the chain is broken"),
    "cut in the middle": (lambda lines: [*lines[:2], lines[2][:40]], "line 3: "),
    "a field too many": (lambda lines: [lines[0][:-1] + ', "x": 1}', *lines[1:]], "line 1: is not an entry"),
    "another type": (lambda lines: [lines[0].replace('"number": 1', '"number": "1"'), *lines[1:]], "line 1: is not an"),
}


@pytest.mark.parametrize(("tamper", "message"), TAMPERED.values(), ids=TAMPERED)
def test_tampering_is_named_by_line(log: Path, tamper: Callable[[list[str]], list[str]], message: str) -> None:
    before = tamper(log.read_text().splitlines())
    log.write_text("\n".join(before) + "\n")
    with pytest.raises(GateError) as caught:
        verify(log)
    assert str(caught.value).startswith(f"{log}: {message}")
    with pytest.raises(GateError):  # nothing is added to a broken log
        add(log, 4)
    assert log.read_text().splitlines() == before


def test_a_cut_off_end_shows_only_against_a_known_head(log: Path) -> None:
    head = verify(log)[-1].hash
    log.write_text("\n".join(log.read_text().splitlines()[:2]) + "\n")
    assert len(verify(log)) == 2
    with pytest.raises(GateError, match=r"no entry has the hash .*: the log was cut off or written anew"):
        verify(log, head)


def test_a_half_written_line_is_named(log: Path) -> None:
    log.write_text(log.read_text()[:-1])
    with pytest.raises(GateError, match="line 3: cut off in the middle"):
        verify(log)


def test_no_log_is_no_entries_to_read_and_an_error_to_verify(tmp_path: Path) -> None:
    assert read_log(tmp_path / "none") == ()
    with pytest.raises(GateError, match="there is no log"):
        verify(tmp_path / "none")


@given(st.data())
def test_any_changed_character_is_found(data: st.DataObject) -> None:
    import tempfile

    entries = []
    previous = BEGIN
    for number in (1, 2):
        values = {"time": f"2026-01-0{number}", "gate": "ä", "file": "f", "sha256": "a", "kvassay": "0", "commit": None}
        entries.append(make_entry(number=number, previous=previous, **values))
        previous = entries[-1].hash
    text = dump(tuple(entries))
    place = data.draw(st.integers(0, len(text) - 2))
    other = data.draw(st.characters(codec="ascii", categories=("L", "N")))
    if text[place] in f" \n{other}":
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_text(text[:place] + other + text[place + 1 :], encoding="utf-8")
        with pytest.raises(GateError):
            read_log(path)
