"""The command itself: quick help, verbs found by name, errors on one line with their exit codes."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvassay import __version__
from kvassay.cli import main as module
from kvassay.cli.main import VERBS, cli, main
from kvassay.errors import BudgetError
from tests.runs import make_run


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


def failing(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """Exit code of a verb that raises `error`."""

    @click.command("ls")
    def ls() -> None:
        raise error

    monkeypatch.setattr(module.LazyGroup, "get_command", lambda *_: ls)
    return run("ls")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["ls", "--help"], ["try", "--help"], ["run", "--help"]]
)
def test_help_imports_no_model_library(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom kvassay.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as stop:\n    assert stop.code == 0, stop.code\n"
        "heavy = {'torch', 'transformers', 'scipy', 'altair', 'vl_convert', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


SLIPS = {
    "key": ('length = "2k"', 'lenght = "2k"', "unknown key 'lenght' (did you mean 'length'?)"),
    "policy": ('"snapkv"', '"snapvk"', "unknown policy 'snapvk' (did you mean 'snapkv'?)"),
    "budget": ("keep=0.25", "keep=no", "budget 'keep=no'"),
    "workload": ("kv_short", "kv_shrot", "unknown workload 'kv_shrot' (did you mean 'kv_short'?)"),
    "model": ("smollm2-135m", "gemma-3-27m", "'gemma-3-27m' is no folder"),
    "length": ('"2k"', '"9k"', "length 9216 leaves no room"),
}


@pytest.mark.parametrize(("right", "wrong", "message"), SLIPS.values(), ids=SLIPS)
def test_a_slip_in_an_experiment_is_told_before_a_model_library_is_imported(
    right: str, wrong: str, message: str, tmp_path: Path
) -> None:
    text = (
        '[experiment]\nname = "first"\nmodels = ["smollm2-135m"]\n[[workload]]\nname = "kv_short"\nlength = "2k"\n'
        '[arms]\npolicies = ["snapkv"]\nbudgets = ["keep=0.25"]\n'
    )
    assert right in text
    file = tmp_path / "first.toml"
    file.write_text(text.replace(right, wrong), encoding="utf-8")
    code = (
        "import sys\nfrom kvassay.cli.main import main\n"
        f"try:\n    main(['run', {str(file)!r}])\nexcept SystemExit as stop:\n    assert stop.code == 2, stop.code\n"
        "heavy = {'torch', 'transformers', 'scipy', 'altair', 'numba', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and message in done.stderr, done.stderr


def test_python_m_kvassay_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "kvassay", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"kvassay, version {__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str) -> None:
    result = CliRunner().invoke(cli, [verb, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage: " in result.output and verb in result.output


def test_help_lists_every_verb_with_its_line() -> None:
    text = CliRunner().invoke(cli, ["--help"]).output
    for verb, (_, line) in VERBS.items():
        assert verb in text and line.split(":")[0].split(";")[0] in " ".join(text.split())


def test_an_unknown_verb_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("shwo") == 2
    assert "no command is called 'shwo' (did you mean 'show'?)" in capsys.readouterr().err


def test_wrong_input_is_one_line_and_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(BudgetError("budget keep=0\n  leaves none"), monkeypatch) == 2
    assert capsys.readouterr().err == "error: budget keep=0 leaves none\n"


def test_interrupted_is_130_and_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err.endswith("interrupted; run the same command to continue\n")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_disk_problems_are_one_line_and_2(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(OSError(number, "No room", "runs/x"), monkeypatch) == 2
    assert capsys.readouterr().err == "error: runs/x: No room\n"


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        failing_error = ZeroDivisionError("a bug")
        monkeypatch.setattr(module.LazyGroup, "invoke", lambda *_: (_ for _ in ()).throw(failing_error))
        main(["ls"])


def test_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    make_run(tmp_path)
    command = f"{sys.executable} -m kvassay show {tmp_path} --json | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("{")
