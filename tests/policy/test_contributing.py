"""The examples in CONTRIBUTING.md are taken out of it and run, so that they cannot rot."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import numpy as np
import torch
from click.testing import CliRunner

from kvassay.cli.policies import policies as command
from kvassay.policy import registry
from kvassay.policy.card import Evidence
from kvassay.policy.views import BlockView
from tests.policy.build import DIM, KV_HEADS, allowance, dense, kept, layer, memory, random_q, view

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def block(language: str) -> str:
    (found,) = blocks(language)
    return found


SCORER, SELECTOR = blocks("python")


def test_the_example_policy_runs_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCORER)
    policy = registry.parse(f"{tmp_path}/mine.py:ValueNorm(power=2)")
    data = dense(20)
    score = policy.score(view(policy, data), memory())
    torch.testing.assert_close(score, data.v.norm(dim=-1) ** 2)
    best = data.v.norm(dim=-1)[0].argsort(descending=True)[:5]
    assert kept(policy, view(policy, data), 5)[0] == sorted(best.tolist())


def test_the_example_selector_reads_the_blocks_of_the_best_mean_key(tmp_path: Path) -> None:
    (tmp_path / "mean_key.py").write_text(SELECTOR)
    policy = registry.parse(f"{tmp_path}/mean_key.py:MeanKey(block=8)")
    data, query = dense(36), random_q(2)
    pairs = data.k.unflatten(1, (9, 4)).transpose(0, 1)
    side = policy.summarize(BlockView(layer(), pairs, pairs))
    assert side["mean"].shape == (9, KV_HEADS, DIM)
    shown = view(policy, data, side=side, block_size=4)
    chosen = policy.read(shown, query.float(), memory(), allowance(16, 36, unit="read_tokens"), None)
    assert chosen is not None and chosen.unit == 8
    keys, q = data.k.numpy()[:, :32].reshape(KV_HEADS, 4, 8, DIM).mean(axis=2), query.numpy()
    for number in range(2):
        for head in range(KV_HEADS):
            of_group = [keys[head] @ q[at, number] for at in (2 * head, 2 * head + 1)]
            best = int(np.max(of_group, axis=0).argmax())
            assert sorted(chosen.index[number, head].tolist()) == [best, 4]  # 4: the block still filling


def test_every_name_in_the_table_of_views_is_one() -> None:
    table = TEXT[TEXT.index("What a `layer` (`LayerView`) offers") : TEXT.index("A policy that needs recorded queries")]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`(\w+)", row[1])}
    assert len(names) > 20 and names <= set(dir(view(registry.parse("dense"), dense(4))))
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[3])} <= set(Evidence.__members__)


def test_the_command_shows_its_card(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCORER)
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
