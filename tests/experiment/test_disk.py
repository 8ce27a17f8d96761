"""What recorded contexts take on disk is said beforehand and near the truth; giving it back loses no result."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from kvassay.cli.main import cli
from kvassay.errors import ExperimentError
from kvassay.experiment import disk
from kvassay.experiment.folder import RunFolder
from kvassay.experiment.plan import Plan, make_plan
from kvassay.experiment.results import Results
from kvassay.experiment.run import run
from kvassay.experiment.schema import load_experiment
from tests.experiment.test_run import FakeReplay, Notes
from tests.experiment.tiny import write_experiment


@pytest.fixture
def plan(tmp_path: Path, tiny_model: Path) -> Plan:
    file = write_experiment(tmp_path, tiny_model, 2)
    return make_plan(load_experiment(file), file.name, tmp_path)


def test_what_is_said_is_what_is_written(plan: Plan, tmp_path: Path) -> None:
    notes, folder = Notes(), tmp_path / "run"
    said = sum(disk._sizes(plan))
    run(plan, folder, notes, replay=FakeReplay())
    written = sum(path.stat().st_size for path in (folder / "traces").rglob("*.safetensors"))
    assert written == pytest.approx(said, rel=0.3)  # a byte tokenizer makes questions long
    (line,) = [line for line in notes.lines if line.startswith("disk, modelled: about ")]
    assert f"in {folder / 'traces'} (0.00 GiB there now, " in line and f"`kvassay clean {folder}`" in line


def test_too_little_room_is_said(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = disk.disk_line(plan, RunFolder(tmp_path / "run"))
    assert "TOO LITTLE" not in line
    monkeypatch.setattr(disk, "free_bytes", lambda path: 100)
    assert "0.00 GiB free: TOO LITTLE" in disk.disk_line(plan, RunFolder(tmp_path / "run"))


def test_cleaning_gives_back_the_contexts_and_keeps_the_results(plan: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(plan, folder, replay=FakeReplay())
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "traces" not in path.parts}
    refused = CliRunner().invoke(cli, ["clean", str(folder)], input="n\n")
    assert refused.output.endswith("nothing was removed\n") and (folder / "traces").is_dir()
    done = CliRunner().invoke(cli, ["clean", str(folder), "--yes"])
    assert done.exit_code == 0 and "MiB given back" in done.output
    assert not (folder / "traces").exists()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == kept
    assert len(Results.open(folder).sets[0].cells) == len(plan.arms)
    again = FakeReplay()
    run(plan, folder, replay=again)
    assert len(again.calls) == 2 and (folder / "traces").is_dir()


def test_an_unfinished_run_or_a_link_is_left_alone(plan: Plan, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    with pytest.raises(KeyboardInterrupt):
        run(plan, folder, replay=FakeReplay(stop_at=1))
    result = CliRunner().invoke(cli, ["clean", str(folder), "--yes"])
    assert isinstance(result.exception, ExperimentError) and "has not finished" in str(result.exception)
    run(plan, folder, replay=FakeReplay())
    (folder / "traces").rename(elsewhere)
    (folder / "traces").symlink_to(elsewhere)
    with pytest.raises(ExperimentError, match="is a link to elsewhere"):
        disk.drop_traces(Results.open(folder))
    assert any(elsewhere.iterdir())
