"""The example in CONTRIBUTING.md is taken out of it and run, so that it cannot rot."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import torch
from click.testing import CliRunner

from kvassay.cli.policies import policies as command
from kvassay.policy import registry
from tests.policy.build import dense, kept, memory, view

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def block(language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(found) == 1
    return found[0]


def test_the_example_policy_runs_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(block("python"))
    policy = registry.parse(f"{tmp_path}/mine.py:ValueNorm(power=2)")
    data = dense(20)
    score = policy.score(view(policy, data), memory())
    torch.testing.assert_close(score, data.v.norm(dim=-1) ** 2)
    best = data.v.norm(dim=-1)[0].argsort(descending=True)[:5]
    assert kept(policy, view(policy, data), 5)[0] == sorted(best.tolist())


def test_the_command_shows_its_card(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(block("python"))
    program, verb, name = block("sh").splitlines()[0].split()
    assert (program, verb) == ("kvassay", "policies")
    done = CliRunner().invoke(command, [f"{tmp_path}/{name}"], env={"COLUMNS": "200"})
    assert done.exit_code == 0 and "value-norm" in done.output and "power=1.0 (float)" in done.output


def test_the_entry_point_group_is_the_one_that_is_read() -> None:
    assert tomllib.loads(block("toml"))["project"]["entry-points"] == {
        registry.GROUP: {"value-norm": "my_package.mine:ValueNorm"}
    }


def test_every_file_it_points_to_exists() -> None:
    for name in ("paged_eviction.py", "kivi.py", "merge.py", "quest.py", "svd.py", "registry.py", "base.py"):
        assert name in TEXT and (ROOT / "src/kvassay/policy" / name).is_file()
    assert (ROOT / "tests/policy/test_scorers.py").is_file()
