"""Every built-in policy on the shapes that differ most: it runs under every law, or says why it cannot."""

from __future__ import annotations

import math

import pytest
import torch

from kvassay.errors import PolicyError
from kvassay.replay.applies import not_applicable
from kvassay.replay.arms import Arm
from tests.families.arms import DENSE
from tests.replay.test_contract_builtin import NAMES, built_in, half
from tests.replay.watch import Watch
from tests.replay.worlds import make

pytestmark = pytest.mark.slow

BLOCK = "must be a multiple of the cache's block size 32|read unit 16 is not 1 or a multiple of 32"
"""Half the heads on full layers: their blocks are of 32 slots, so that all blocks are of as many bytes."""
ROTATED = ("expected-attention", "svd", "recalkv", "dynacalkv")
"""What takes rotations back that are not taken back here; left out of a replay."""

UNROTATABLE = ("gemma4", "gemma4_k_eq_v", "gpt_oss")

REFUSED: dict[str, dict[str, str]] = {
    "mimo_v2_flash": dict.fromkeys(("quest", "locks", "centroid", "m3-exact-mass", "m3-distilled"), BLOCK),
    "laguna": {},
    "cohere2_moe": {},
    "gemma4": {},
    "gemma4_k_eq_v": {},
    "gpt_oss": {},
}


def arms(names: list[str]) -> list[Arm]:
    return [arm for name in names for arm in half(built_in(name))]


@pytest.mark.parametrize("family", REFUSED)
def test_it_runs_or_says_why_not(family: str, watch: Watch, tmp_path_factory: pytest.TempPathFactory) -> None:
    this = make(tmp_path_factory.mktemp(family), family, 150)
    names = [name for name in NAMES if not name.startswith("kvpress")]  # that needs an environment of its own
    left = {label.split(" ")[0].split("(")[0]: why for label, why in not_applicable(this.trace, arms(names)).items()}
    assert set(left) == (set(ROTATED) if family in UNROTATABLE else set())
    assert all(why.startswith("blocked: RoPE kind ") for why in left.values())
    run = [name for name in names if name not in REFUSED[family]]
    rows = watch.run(this, [DENSE, *arms([name for name in run if name != "dense"])], calibration=this.calibration)
    assert {row.arm.split()[0].split("(")[0] for row in rows} == set(run) - set(left)
    assert all(math.isfinite(row.nll) for row in rows)
    assert all(torch.isfinite(logits).all() for logits in watch.logits.values())
    for name, reason in REFUSED[family].items():
        with pytest.raises(PolicyError, match=reason):
            watch.run(this, [DENSE, *arms([name])], calibration=this.calibration)
