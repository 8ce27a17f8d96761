from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvassay.cli.models import models
from kvassay.errors import ModelError
from kvassay.record import fetch as fetching


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASSAY_CACHE", str(tmp_path))


def put(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "models" / name
    folder.mkdir(parents=True)
    (folder / "kvassay.json").write_text(json.dumps({"bytes": 541_600_000}))


def test_list_says_what_is_there(tmp_path: Path) -> None:
    put(tmp_path, "smollm2-135m")
    rows = json.loads(CliRunner().invoke(models, ["list", "--json"]).stdout)
    found = {row["name"]: (row["fetched"], row["bytes"], row["native_context"]) for row in rows}
    assert found == {"smollm2-135m": (True, 541_600_000, 8192), "gemma-3-270m": (False, None, 32768)}


def test_the_table_shows_licence_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    put(tmp_path, "smollm2-135m")
    text = CliRunner().invoke(models, ["list"]).stdout
    smol = next(line for line in text.splitlines() if "smollm2-135m" in line)
    gemma = next(line for line in text.splitlines() if "gemma-3-270m" in line)
    assert "Apache-2.0" in smol and "yes" in smol and "542 MB" in smol
    assert "Gemma Terms of Use (not open source)" in gemma and "239 MB to download" in gemma


def test_fetch_shows_the_licence_before_it_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, progress: object, *, force: bool) -> Path:
        raise ModelError("stopped here")

    monkeypatch.setattr(fetching, "fetch", fetch)
    result = CliRunner().invoke(models, ["fetch", "gemma-3-270m"])
    assert "Gemma Terms of Use" in result.stderr
    assert "NOT open source" in result.stderr
    assert str(result.exception) == "stopped here"


def test_fetch_all_takes_every_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def fetch(name: str, progress: object, *, force: bool) -> Path:
        asked.append((name, force))
        return tmp_path

    monkeypatch.setattr(fetching, "fetch", fetch)
    result = CliRunner().invoke(models, ["fetch", "--all", "--force"])
    assert asked == [("smollm2-135m", True), ("gemma-3-270m", True)]
    assert f"gemma-3-270m: ready in {tmp_path}" in result.stdout


def test_fetch_refuses_no_name_and_wrong_names() -> None:
    nothing = CliRunner().invoke(models, ["fetch"])
    assert nothing.exit_code == 2
    assert "--all" in nothing.stderr
    wrong = CliRunner().invoke(models, ["fetch", "smollm2"])
    assert isinstance(wrong.exception, ModelError)
    assert "did you mean 'smollm2-135m'?" in str(wrong.exception)
