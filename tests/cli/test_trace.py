from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest
import torch
from click.testing import CliRunner, Result

from kvassay.cli.trace import trace
from kvassay.errors import KvassayError
from kvassay.trace.reader import Trace
from kvassay.trace.schema import TraceHeader

from ..trace import corrupt, tiny


def run(*args: object) -> Result:
    """Run the group as the program does: a KvassayError is one line on stderr and exit status 2."""

    @click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    @click.pass_context
    def program(context: click.Context) -> None:
        try:
            trace.main(context.args, standalone_mode=False, prog_name="kvassay trace")
        except KvassayError as error:
            click.echo(f"error: {error}", err=True)
            context.exit(2)

    return CliRunner().invoke(program, [str(a) for a in args])


@pytest.fixture
def made(tmp_path: Path) -> tiny.Made:
    return tiny.make(tmp_path / "trace")


def test_show_prints_what_the_trace_holds(made: tiny.Made) -> None:
    result = run("show", made.path)
    assert result.exit_code == 0
    for part in ("tiny (tiny, apache-2.0)", "1 full, 1 sliding, 1 shared", "prefix from position 7", "blue sky"):
        assert part in result.stdout


def test_show_json_counts_bytes_by_kind(made: tiny.Made) -> None:
    data = json.loads(run("show", made.path, "--json").stdout)
    # 20 tokens; queries of 13; K 2*4+8, V 2*3+6, Q 4*4+3*8+8*4 elements of 4 bytes
    assert data["bytes"] == {
        "tokens": 20 * 4,
        "k": 20 * 16 * 4,
        "v": 20 * 12 * 4,
        "q": 13 * 72 * 4,
        "taps": (20 * 16 + 13 * 4 + 13 * 24) * 4,
        "logits": 9 * 50 * 4,
    }
    assert data["layers"] == {"full": 1, "sliding": 1, "shared": 1}
    assert data["evidence"] == {
        "queries": "prefix from position 7, branches",
        "logits": "full, branches",
        "tap hidden": "layers 1",
        "tap lse": "layers 0",
        "tap output": "layers 2",
    }


def test_verify_says_sound_or_lists_every_problem(made: tiny.Made) -> None:
    result = run("verify", made.path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "sound; 23 shards" in result.stdout
    corrupt.flip_byte(made.path)
    (made.path / "stray").write_text("")
    result = run("verify", made.path)
    assert result.exit_code == 2
    assert [line.split(": ")[1][:9] for line in result.stdout.splitlines()] == ["sha256 is", "not part "]
    assert result.stderr == f"error: {made.path}: 2 problems found\n"


@pytest.mark.parametrize("name", corrupt.STRUCTURE)
@pytest.mark.parametrize("verb", ["show", "verify"])
def test_a_damaged_trace_is_one_line_and_exit_2(made: tiny.Made, name: str, verb: str) -> None:
    corrupt.STRUCTURE[name][0](made.path)
    result = run(verb, made.path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr


def test_reblock_writes_the_overlay(made: tiny.Made) -> None:
    result = run("reblock", made.path, "--block-size", 4)
    assert (result.exit_code, result.stdout.strip()) == (0, str(made.path / "blocks/block_4.json"))
    assert Trace.open(made.path).overlays == ("block_4",)
    again = run("reblock", made.path, "--block-size", 4)
    assert (again.exit_code, len(again.stderr.splitlines())) == (2, 1)
    assert run("reblock", made.path, "--block-size", 4, "--overwrite").exit_code == 0
    assert run("reblock", made.path, "--block-size", 8, "--name", "../x").exit_code == 2
    assert run("reblock", made.path, "--block-size", 0).exit_code == 2


def test_reproduce_records_again_and_compares(made: tiny.Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers: list[TraceHeader] = []
    seed = 0

    def rerecord(header: TraceHeader, out_dir: Path, *, model: str | None) -> Trace:
        headers.append(header)
        return Trace.open(tiny.make(out_dir, seed=seed).path)

    recorder = ModuleType("kvassay.record.again")
    recorder.rerecord = rerecord  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvassay.record.again", recorder)

    recipe = tmp_path / "recipe.json"
    assert run("fingerprint", made.path, "-o", recipe).exit_code == 0
    for source in (made.path, recipe):
        result = run("reproduce", source)
        assert (result.exit_code, result.stdout) == (0, f"{source}: reproduced within 0.001\n")
    assert headers == [made.header] * 2

    seed = 1
    result = run("reproduce", recipe, "--keep", tmp_path / "kept")
    assert result.exit_code == 2
    assert "prefix/layer_000 'k': norm" in result.stdout
    assert result.stderr.endswith("differences beyond 0.001\n")
    assert not torch.equal(Trace.open(tmp_path / "kept").prefix.k(0), made.rows["prefix", 0, "k"])
