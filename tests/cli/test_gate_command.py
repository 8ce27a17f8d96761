"""`kvassay gate` and `kvassay run --gate`, from a declaration to a verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvassay.cli.main import cli, main
from kvassay.gate.chain import LOG, read_log
from kvassay.measure import resample
from tests.experiment.tiny import save_tiny_model, write_experiment
from tests.gate import made
from tests.gate.folder import write_run


def invoke(*arguments: object) -> Result:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    assert caught.value.code == 2
    found = capsys.readouterr().err
    assert found.count("\n") == 1
    return found


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resample, "RESAMPLES", 199)


@pytest.fixture
def gate_file(tmp_path: Path) -> Path:
    file = tmp_path / "gate.toml"
    file.write_text(made.GATE, encoding="utf-8")
    return file


def test_declare_prints_entry_and_what_the_samples_can_tell(gate_file: Path) -> None:
    lines = invoke("gate", "declare", gate_file).output.splitlines()
    (entry,) = read_log(gate_file.parent / LOG)
    assert lines[0] == (f"gate hand declared at {entry.time}: entry 1 of {gate_file.parent / LOG}, hash {entry.hash}")
    assert lines[1] == "8 contexts of 1 questions per trace set, alpha 0.05, power 0.8:"
    assert lines[2].startswith("  top1: margin 0.1 fraction, 8 contexts planned; smallest detectable difference 0.")
    assert "contexts would do" in lines[2]
    assert invoke("gate", "declare", gate_file).output.startswith("gate hand was declared already, unchanged, at ")


def test_verify_proves_the_chain_or_exits_with_2(gate_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    invoke("gate", "declare", gate_file)
    log = gate_file.parent / LOG
    (entry,) = read_log(log)
    assert invoke("gate", "verify", log.parent).output.splitlines()[-1] == (
        f"{log}: 1 entries, the chain is whole, head {entry.hash}"
    )
    assert "was cut off or written anew" in refused(capsys, "gate", "verify", log, "--head", "0" * 64)
    log.write_text(log.read_text().replace("hand", "hang"))
    assert f"{log}: line 1: was edited" in refused(capsys, "gate", "verify", log)


def test_a_run_is_judged_shown_and_drafted(tmp_path: Path, gate_file: Path) -> None:
    run = write_run(tmp_path / "run").path
    said = invoke("gate", run, "--gate", gate_file, "--exploratory", "--json", "--issue", tmp_path / "issues")
    data = json.loads(said.stdout)["judgement"]
    assert (data["exploratory"], data["verdicts"][0]["outcome"], data["verdicts"][0]["arm"]) == (
        True,
        "promote",
        made.CAND,
    )
    assert said.stderr.strip() == str(tmp_path / "issues" / "cand-keep-0.25.md")
    assert invoke("show", run).output.startswith("! EXPLORATORY")
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.index("EXPLORATORY") < page.index("<h1>") and '<span class="outcome promote">promote</span>' in page
    judged = invoke("gate", "judge", run, "--gate", gate_file, "--exploratory").output
    assert judged == invoke("gate", run, "--gate", gate_file, "--exploratory").output


def test_refusals_are_one_line(tmp_path: Path, gate_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run").path
    assert "was never declared" in refused(capsys, "gate", run, "--gate", gate_file)
    assert "no such folder" in refused(capsys, "gate", tmp_path / "none")
    gate_file.write_text(made.GATE.replace("margin", "margn"))
    assert "unknown key 'margn' (did you mean 'margin'?)" in refused(capsys, "gate", "declare", gate_file)
    with pytest.raises(SystemExit) as caught:
        main(["run", "x.toml", "--exploratory"])
    assert caught.value.code == 2 and "--exploratory needs --gate" in capsys.readouterr().err


TINY = made.GATE.replace("contexts = 8", "contexts = 5").replace('["needle_multikey", ', '["kv_short", ')


def test_from_declaration_to_verdict_and_a_change_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = write_experiment(tmp_path, save_tiny_model(tmp_path / "tiny-llama"), contexts=1)
    capsys.readouterr()  # what saving the model printed
    gate_file, run = tmp_path / "gate.toml", tmp_path / "out"
    gate_file.write_text(TINY, encoding="utf-8")
    begin = ("run", experiment, "--out", run, "--jobs", 1, "--gate", gate_file)
    assert "was never declared" in refused(capsys, *begin)
    assert not run.exists()
    invoke("gate", "declare", gate_file)
    text = invoke(*begin).stdout
    assert text.startswith("Gate hand (declared ")
    data = json.loads((run / "verdicts.json").read_text())["judgement"]
    overall = [verdict for verdict in data["verdicts"] if not verdict["trace_set"]]
    assert [verdict["arm"] for verdict in overall] == ["knorm keep=0.5"]
    # a random model is below the dense floor: nothing may be judged there
    assert overall[0]["outcome"] == "hold" and "dense is below its floor" in overall[0]["reason"]
    assert "acts on full layers" in overall[0]["scope"] and not data["exploratory"]
    cells = (run / "cells.parquet").read_bytes()
    (run / "verdicts.json").unlink()
    assert invoke(*begin[:-2]).stdout.startswith("Gate hand (declared ")  # the folder's gate judges it again
    gate_file.write_text(TINY.replace("margin = 0.1", "margin = 0.3"), encoding="utf-8")
    assert "was changed since it was declared" in refused(capsys, "gate", run, "--gate", gate_file)
    assert "was changed since it was declared" in refused(capsys, *begin)
    assert invoke("gate", run, "--gate", gate_file, "--exploratory").output.startswith("! EXPLORATORY")
    assert (run / "cells.parquet").read_bytes() == cells
    assert invoke("gate", run).output.startswith("Gate hand (declared ")  # the pinned gate still judges


def test_help_imports_neither_torch_nor_the_gate() -> None:
    code = "import sys; from kvassay.cli.gate import gate; print('torch' in sys.modules, 'kvassay.gate' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
