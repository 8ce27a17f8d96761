"""Every built-in policy on the shapes that differ most: it runs under every law, or says why it cannot."""

from __future__ import annotations

import math

import pytest
import torch

from kvassay.policy.budget import Budget, Protection
from kvassay.policy.registry import make as policy
from kvassay.replay.applies import not_applicable
from kvassay.replay.arms import Arm
from tests.families.arms import DENSE
from tests.replay.test_contract_builtin import NAMES, built_in, half
from tests.replay.watch import Watch
from tests.replay.worlds import make

pytestmark = pytest.mark.slow

BLOCKS = ("quest", "locks", "centroid", "m3-exact-mass", "m3-distilled")
"""What reads blocks of 16. With half the heads on full layers, those hold blocks of 32, so that all weigh the same."""
ROTATED = ("expected-attention", "svd", "recalkv", "dynacalkv")
"""What takes rotations back that are not taken back here."""
LEFT_OUT: dict[str, dict[str, str]] = {
    "mimo_v2_flash": dict.fromkeys(
        BLOCKS,
        "it reads blocks of 16 tokens, the cache's blocks hold 32 in 2 of 4 layers: give block=32 or a multiple",
    ),
    "laguna": {},
    "cohere2_moe": {},
    **dict.fromkeys(("gemma4", "gemma4_k_eq_v", "gpt_oss"), dict.fromkeys(ROTATED, "blocked: RoPE kind ")),
}


def arms(names: list[str]) -> list[Arm]:
    return [arm for name in names for arm in half(built_in(name))]


@pytest.mark.parametrize("family", LEFT_OUT)
def test_it_runs_or_says_why_not(family: str, watch: Watch, tmp_path_factory: pytest.TempPathFactory) -> None:
    this = make(tmp_path_factory.mktemp(family), family, 150)
    names = [name for name in NAMES if not name.startswith("kvpress")]  # that needs an environment of its own
    left = {
        label.split(" ")[0].split("(")[0]: why for label, why in not_applicable(this.trace, arms(names), 16).items()
    }
    expected = LEFT_OUT[family]
    assert set(left) == set(expected) and all(why.startswith(expected[name]) for name, why in left.items())
    rows = watch.run(this, [DENSE, *arms([name for name in names if name != "dense"])], calibration=this.calibration)
    assert {row.arm.split()[0].split("(")[0] for row in rows} == set(names) - set(left)
    assert all(math.isfinite(row.nll) for row in rows)
    assert all(torch.isfinite(logits).all() for logits in watch.logits.values())


def test_selectors_read_the_larger_blocks_of_keys_and_values_of_other_sizes(
    watch: Watch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    this = make(tmp_path_factory.mktemp("mimo"), "mimo_v2_flash", 150)
    budget, protection = Budget("read_tokens", 0.7), Protection(0, 0)  # three blocks of five, or six
    first = {name: {"dense_layers": 0} for name in ("quest", "m3-exact-mass", "m3-distilled")}
    wide = [Arm(policy(name, block=32, **first.get(name, {})), budget, protection) for name in BLOCKS]
    rows = watch.run(this, [DENSE, *wide], calibration=this.calibration)
    assert {row.arm for row in rows} == {arm.label for arm in [DENSE, *wide]}
    assert all(math.isfinite(row.nll) for row in rows)
    dense = min(row.selected_tokens for row in rows if row.arm == DENSE.label)
    assert all(row.selected_tokens < dense for row in rows if row.arm != DENSE.label)
