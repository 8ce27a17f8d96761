from __future__ import annotations

import hashlib
import math
import subprocess
from pathlib import Path

import pytest
import scipy.stats

from kvassay import __version__
from kvassay.errors import GateError
from kvassay.gate.chain import LOG, read_log
from kvassay.gate.declare import declare, detectable
from kvassay.gate.order import file_commit, git_order
from tests.gate.made import GATE, gate


def write(folder: Path, text: str = GATE, name: str = "gate.toml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_a_declaration_enters_hash_version_and_name(tmp_path: Path) -> None:
    file = write(tmp_path)
    found = declare(file)
    (entry,) = read_log(tmp_path / LOG)
    assert found.anew and found.entry == entry
    assert entry.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (entry.gate, entry.file, entry.kvassay, entry.commit) == ("hand", "gate.toml", __version__, None)


def test_the_same_file_is_entered_once_and_a_changed_one_again(tmp_path: Path) -> None:
    file = write(tmp_path)
    declare(file)
    assert not declare(file).anew
    write(tmp_path, GATE.replace("0.1", "0.2"))
    assert declare(file).entry.number == 2
    write(tmp_path)
    assert declare(file).entry.number == 3  # back again is a change too


def test_a_wrong_gate_is_not_entered(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="unknown key"):
        declare(write(tmp_path, GATE.replace("margin", "margn")))
    assert not (tmp_path / LOG).exists()


def test_the_detectable_difference_is_that_of_the_noncentral_t() -> None:
    text = GATE.replace("contexts = 8", "contexts = 20\nquestions = 4\nspread = { top1 = 0.3 }\ncorrelation = 0.25")
    (found,) = detectable(gate(text))
    error = 0.3 * math.sqrt((1 + 3 * 0.25) / 80)
    assert found.smallest is not None
    critical = scipy.stats.t.isf(0.05, 19)
    assert scipy.stats.nct.sf(critical, 19, found.smallest / error) == pytest.approx(0.8, abs=1e-6)
    assert found.enough is False and found.needed is not None and found.needed > 20
    assert f"too few samples, an arm equal to dense may be held; {found.needed} contexts would do" in found.line
    more = gate(text.replace("contexts = 20", f"contexts = {found.needed}"))
    assert detectable(more)[0].enough


def test_contexts_that_agree_still_have_to_be_many() -> None:
    text = GATE.replace("contexts = 8", "contexts = 28\nspread = { top1 = 0.001 }")
    (found,) = detectable(gate(text))
    assert (found.agreeing, found.needed, found.enough) == (29, 29, False)  # 0.9^28 = 0.0523, 0.9^29 = 0.0471
    assert detectable(gate(text.replace("contexts = 28", "contexts = 29")))[0].enough


def test_without_a_stated_spread_the_assumption_is_said() -> None:
    (found,) = detectable(gate())
    assert "assumed: 10% of answers flip, correlation 0.5 within a context" in found.line
    (unknown,) = detectable(gate(GATE.replace('"top1"', '"nll"')))
    assert (unknown.smallest, unknown.enough) == (None, None)
    assert unknown.line.endswith("state it in [samples] spread, e.g. { nll = 0.3 }")


def git(folder: Path, *arguments: str) -> str:
    options = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *options, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(folder: Path, *names: str) -> str:
    git(folder, "add", "--", *names)
    git(folder, "commit", "-m", "x", "--", *names)
    return git(folder, "rev-parse", "HEAD")


def test_git_tells_which_came_first(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    other = commit(tmp_path, write(tmp_path, "", "readme").name)
    file, run = write(tmp_path), tmp_path / "run"
    assert file_commit(file) is None and git_order(file, run, {}).state == "unknown"
    first = commit(tmp_path, "gate.toml")
    assert file_commit(file) == first
    assert git_order(file, run, {"commit": {"commit": first}}).state == "before"
    assert git_order(file, run, {"commit": {"commit": other}}).state == "not_before"
    assert git_order(file, run, {"commit": {"commit": "0" * 40}}).state == "unknown"  # another repository's
    write(run, "x", "cells.parquet")
    commit(tmp_path, "run/cells.parquet")
    assert git_order(file, run, {"commit": None}).state == "before"
    write(tmp_path, GATE.replace("0.1", "0.3"))
    assert file_commit(file) is None  # changed, not committed
    commit(tmp_path, "gate.toml")
    assert git_order(file, run, {"commit": None}).state == "not_before"


def test_a_gate_that_came_with_the_results_proves_nothing(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    file, run = write(tmp_path), tmp_path / "run"
    write(run, "x", "cells.parquet")
    commit(tmp_path, "gate.toml", "run/cells.parquet")
    assert git_order(file, run, {"commit": None}).state == "not_before"
