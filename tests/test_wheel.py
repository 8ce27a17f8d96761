"""The built wheel works without the repository around it: every data file is inside, and nothing reads a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow
Kvassay = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's contents, as pip would put them into site-packages. Built from a copy, which stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", folder / "copy" / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "copy" / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), "./copy"]
    subprocess.run(build, cwd=folder, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("kvassay-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    shutil.rmtree(folder / "copy")
    return folder / "site"


@pytest.fixture
def kvassay(unpacked: Path, tmp_path: Path) -> Kvassay:
    """Runs the wheel's command in an empty folder; the checkout is hidden behind the wheel."""

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(unpacked)}
        command = [sys.executable, "-m", "kvassay", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return call


def test_every_file_of_the_package_is_in_the_wheel(unpacked: Path) -> None:
    here = {path.relative_to(ROOT / "src") for path in (ROOT / "src" / "kvassay").rglob("*") if path.is_file()}
    there = {path.relative_to(unpacked) for path in (unpacked / "kvassay").rglob("*") if path.is_file()}
    compiled = {path for path in here | there if "__pycache__" in path.parts}
    assert here - compiled == there - compiled


def test_the_wheels_own_code_runs(unpacked: Path, tmp_path: Path) -> None:
    code = "import kvassay; print(kvassay.__file__)"
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()).is_relative_to(unpacked)


@pytest.mark.parametrize(
    "words, said",
    [
        (("--version",), "kvassay"),
        (("policies",), "snapkv"),
        (("policies", "--markdown"), "## locks"),
        (("workloads",), "needle_multikey"),
        (("inspect",), "glm-5.2"),
        (("inspect", "gemma-4-31b", "--context", "128k"), "sliding"),
        (("cost", "hy3", "--context", "128k", "--hardware", "h200"), "modelled"),
        (("applicability",), "locks"),
        (("columns", "top1_diff_low"), "top1_diff_low"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_commands_that_read_data_files(kvassay: Kvassay, words: tuple[str, ...], said: str) -> None:
    found = kvassay(*words)
    assert found.returncode == 0, found.stderr
    assert said in found.stdout


def test_a_gate_is_declared(kvassay: Kvassay, unpacked: Path, tmp_path: Path) -> None:
    shutil.copy(unpacked / "kvassay" / "gate" / "gates" / "example.toml", tmp_path / "gate.toml")
    found = kvassay("gate", "declare", "gate.toml")
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "gate-log.jsonl").is_file()
