"""Policies on MLA: each kind by hand in float64 with keys and values made anew, the others refused with the reason."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvassay.policy.applicability import applicability
from kvassay.policy.budget import Budget
from kvassay.policy.registry import make
from kvassay.replay.applies import not_applicable
from kvassay.replay.arms import Arm
from tests.families import models, rules, world
from tests.families.arms import DENSE, PROTECTION
from tests.families.conftest import Recorded
from tests.families.mla_oracle import MlaOracle
from tests.replay.oracle import code
from tests.replay.plain import top
from tests.replay.test_contract_builtin import NAMES, built_in, half
from tests.replay.watch import Watch
from tests.replay.worlds import World
from tests.replay.worlds import make as make_world

KEEP, WINDOW, KERNEL = 24, 4, 3
EVICT = Arm(make("snapkv", window=WINDOW, kernel=KERNEL), Budget("keep_tokens", KEEP), PROTECTION)
SELECT = Arm(make("exact_mass"), Budget("read_tokens", KEEP), PROTECTION)
QUANTISE = Arm(make("int8"), None, PROTECTION)
INDEXED = ("deepseek_v32", "glm_moe_dsa")
ROW, TOPK, INDEX_ROW = 32, 6, 16
FED = world.QUESTION + world.ANSWER - 1


def attention(this: World, index: int, t: int) -> Tensor:
    """float64 [q_heads, t + 1]: what the recorded query of position t gives the tokens before, as the model chose."""
    layer, prefix = this.trace.layout.layers[index], this.trace.prefix
    module = this.exact.get_decoder().layers[index].self_attn
    rows = prefix.k(index)[: t + 1, 0].double()
    # Absorbed, a query is against the cached vectors what the expanded one is against keys.
    logits = torch.stack([rows @ q for q in prefix.q(index)[t].double()]) * module.scaling
    chosen = prefix.selection(index)
    if chosen is not None:
        hidden = torch.ones(t + 1, dtype=torch.bool)
        hidden[[int(j) for j in chosen[t, 0] if j >= 0]] = False
        logits[:, hidden] = -math.inf
    assert layer.kv.row == rows.shape[1]
    return torch.softmax(logits, -1)


def snapkv(this: World, oracle: MlaOracle) -> None:
    length = oracle.context
    for index in oracle.full:
        score = torch.zeros(length, dtype=torch.float64)
        for t in range(length - WINDOW, length):
            score[: t + 1] += attention(this, index, t).mean(0) / WINDOW
        score[length - WINDOW :] = 0
        pooled = rules.smooth(score, KERNEL)
        pooled[length - WINDOW :] = math.inf
        oracle.alive[index] = top(pooled[None], KEEP, rules.SINK, rules.RECENT, length)


def exact_mass(oracle: MlaOracle, logits: Tensor) -> Tensor:
    mass = torch.softmax(logits, -1).sum(0)
    return top(mass[None], KEEP, rules.SINK, rules.RECENT, oracle.length)[0]


def int8(oracle: MlaOracle) -> None:
    for index in oracle.full:
        for position in range(oracle.context):
            _code(oracle, index, position)
    oracle.written = lambda oracle, index: _code(oracle, index, oracle.length - 1)


def _code(oracle: MlaOracle, index: int, position: int) -> None:
    """The whole vector, latent and rotary part, at one scale: it is coded once, whatever reads it."""
    row = oracle.k[index][0]
    row[position] = code(row[position].float(), 8)


def by_hand(arm: Arm, this: World) -> MlaOracle:
    oracle = MlaOracle(this)
    if arm is EVICT:
        snapkv(this, oracle)
    elif arm is QUANTISE:
        int8(oracle)
    else:
        oracle.choose = exact_mass
    return oracle


@pytest.mark.parametrize("family", models.LATENT)
def test_policies_are_the_methods_by_hand(family: str, recorded: Recorded, watch: Watch) -> None:
    this = recorded(family)
    arms = [EVICT, QUANTISE] if family in INDEXED else [EVICT, SELECT, QUANTISE]
    rows = {row.arm: row for row in watch.run(this, [DENSE, *arms])}
    dense, branch = watch.logits["dense", 0].double(), this.trace.branches[0]
    element = this.trace.layout.element_bytes
    for arm in arms:
        oracle = by_hand(arm, this)
        expected = oracle.answer(branch)
        found = watch.logits[arm.label, 0].double()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3, msg=lambda m, arm=arm: f"{arm.label}: {m}")
        assert float((dense - expected).abs().max()) > (0.003 if arm is QUANTISE else 0.02) * float(dense.abs().max())
        steps = torch.tensor([oracle.read[layer.index][:FED] for layer in this.trace.layout.layers]).double()
        if arm is not SELECT:
            assert rows[arm.label].selected_tokens == pytest.approx(float(steps.mean()))
    held = world.CONTEXT + FED
    layers, indexed = 4, sum(layer.index_keys is not None for layer in this.trace.layout.layers)
    mine = rows["dense"]
    assert mine.retained_bytes == element * held * (layers * ROW + indexed * INDEX_ROW)
    assert mine.index_bytes == element * held * indexed * INDEX_ROW
    seen = world.CONTEXT + (FED + 1) / 2
    assert mine.index_read_bytes == element * seen * indexed * INDEX_ROW
    assert mine.read_bytes - mine.index_read_bytes == element * layers * ROW * (TOPK if family in INDEXED else seen)
    assert rows["dense"].selected_tokens == (TOPK if family in INDEXED else world.CONTEXT + (FED + 1) / 2)


@pytest.mark.parametrize("family", INDEXED)
def test_a_query_reads_only_of_what_is_kept(family: str, recorded: Recorded, watch: Watch) -> None:
    """Dropped tokens do not take part in the choice, so as many are read; a sharing layer reads fewer."""
    this = recorded(family)
    oracle = by_hand(EVICT, this)
    oracle.answer(this.trace.branches[0])
    for layer in this.trace.layout.layers:
        if layer.index_keys is not None:
            assert set(oracle.read[layer.index]) == {TOPK}
    if family == "glm_moe_dsa":
        assert sum(oracle.read[2]) < TOPK * len(oracle.read[2])  # its choice is layer 1's, who kept other tokens


REDUNDANT, BLOCKED = "redundant", "blocked"
ON_LATENTS = {
    "adakv-snapkv": REDUNDANT,
    "dynacalkv": REDUNDANT,
    "recalkv": REDUNDANT,
    "svd": REDUNDANT,
    "kivi": BLOCKED,
    "think": BLOCKED,
    "rdkv": BLOCKED,
    "rdkv-calibrated": BLOCKED,
    "selkv": BLOCKED,
    "nearest-merge": BLOCKED,
}
WHERE_AN_INDEX_SELECTS = ("exact_mass", "quest", "locks", "centroid", "m3-exact-mass", "m3-distilled")
"""All of them redundant."""


def arms() -> list[Arm]:
    """Every built-in policy once, small enough for the tiny contexts."""
    small = {
        "snapkv": {"window": 4, "kernel": 3},
        "pyramidkv": {"window": 4, "kernel": 3},
        "adakv-snapkv": {"window": 4, "kernel": 3},
        "quest": {"dense_layers": 0},
        "m3-exact-mass": {"block": 16},
        "m3-distilled": {"block": 16},
    }
    found = []
    for name in (*ON_LATENTS, *WHERE_AN_INDEX_SELECTS, "random", "recency", "streaming", "snapkv", "knorm", "tova"):
        policy = make(name, **small.get(name, {}))
        unit = next(iter(sorted(policy.card.budgets)), None)
        found.append(Arm(policy, None if unit is None else Budget(unit, 0.5), PROTECTION))
    return found


@pytest.mark.parametrize("family", models.LATENT)
def test_what_makes_no_sense_is_left_out_with_the_reason(family: str, recorded: Recorded) -> None:
    found = not_applicable(recorded(family).trace, arms(), 16)
    said = {label.split(" ")[0].split("(")[0]: reason for label, reason in found.items()}
    expected = ON_LATENTS | (dict.fromkeys(WHERE_AN_INDEX_SELECTS, REDUNDANT) if family in INDEXED else {})
    assert {name: reason.split(":")[0] for name, reason in said.items()} == expected
    state = "mla_index" if family in INDEXED else "mla"
    for name in ("dynacalkv", "rdkv", "selkv", *(["locks"] if family in INDEXED else [])):
        cell = applicability()[name][state]
        assert said[name] == f"{cell.answer}: {cell.reason} (4 of 4 layers, latent)"


def test_a_refused_arm_is_left_out_of_a_replay(recorded: Recorded, watch: Watch) -> None:
    kivi = Arm(make("kivi"), None, PROTECTION)
    rows = watch.run(recorded("deepseek_v32"), [DENSE, kivi, SELECT, EVICT])
    assert [row.arm for row in rows] == ["dense", EVICT.label]


@pytest.mark.slow
@pytest.mark.parametrize("family", models.LATENT)
def test_every_other_policy_runs_under_every_law(
    family: str, watch: Watch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    this = make_world(tmp_path_factory.mktemp(family), family, 150)
    names = [name for name in NAMES if name != "dense" and not name.startswith("kvpress")]
    every = [arm for name in names for arm in half(built_in(name))]
    left = not_applicable(this.trace, every, 16)
    refused = set(ON_LATENTS) | (set(WHERE_AN_INDEX_SELECTS) if family in INDEXED else set())
    assert {label.split(" ")[0].split("(")[0] for label in left} == refused
    rows = watch.run(this, [DENSE, *every], calibration=this.calibration)
    assert {row.arm.split()[0].split("(")[0] for row in rows} == {"dense", *names} - refused
    assert all(math.isfinite(row.nll) for row in rows)
