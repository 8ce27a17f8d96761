"""Whose fault an error in a policy's method is, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvassay.cache.edits import Decision
from kvassay.errors import BudgetError, PolicyError
from kvassay.policy import registry
from kvassay.policy.answers import answering, checked_edits
from kvassay.policy.base import Policy
from kvassay.replay.asking import propose
from tests.policy.build import allowance, cache, dense, memory, view
from tests.policy.test_registry import PLUGIN

BODY = "return layer.values.norm(dim=-1) ** self.power"
LINE = 1 + PLUGIN[: PLUGIN.index(BODY)].count("\n")


def asked(policy: Policy, tokens: int = 4) -> Decision:
    return propose(policy, cache(view(policy, dense(10))), memory(), allowance(tokens, 10))


def plugin(folder: Path, body: str, name: str = "{}") -> Policy:
    """A policy from a file whose `score` does what `body` says, in line `LINE`."""
    (folder / "mine.py").write_text(PLUGIN.replace(BODY, body))
    return registry.parse(name.format("mine.py:ValueNorm"), folder)


@pytest.mark.parametrize("name", ["{}", "{}+int8", "{}(keep=0.4)+exact_mass(read=0.5)"])
@pytest.mark.parametrize(
    ("body", "said", "kind"),
    [
        ("return 1 / 0", "ZeroDivisionError: division by zero", ZeroDivisionError),
        ("raise ValueError('first\\n second')", "ValueError: first second", ValueError),
        ("raise StopIteration", "StopIteration", StopIteration),
        ("return __import__('json').loads('{')", "JSONDecodeError: Expecting .*", ValueError),
    ],
)
def test_a_plug_ins_fault_names_policy_method_layer_and_line(
    tmp_path: Path, name: str, body: str, said: str, kind: type[Exception]
) -> None:
    where = rf"^policy 'vnorm', score of layer 0: {said} \({tmp_path}/mine\.py:{LINE}\)$"
    with pytest.raises(PolicyError, match=where) as caught:
        asked(plugin(tmp_path, body, name))
    assert isinstance(caught.value.__cause__, kind)


@pytest.mark.parametrize("name", ["{}", "{}+int8", "{}~flipped", "{}~shuffled"])
def test_a_score_that_is_no_tensor_is_said(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        PolicyError, match=r"^policy 'vnorm.*' scored layer 0 with NoneType, a tensor \[2, 10\] needed$"
    ):
        asked(plugin(tmp_path, "return None", name))


def test_a_composition_checks_the_shape_of_scores(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"^policy 'vnorm' scored layer 0 with shape \[2, 9\], \[2, 10\] needed$"):
        asked(plugin(tmp_path, "return layer.values[:, 1:, 0]", "{}+int8"))


def test_what_fails_in_the_package_is_not_the_plug_ins(tmp_path: Path) -> None:
    with pytest.raises(TypeError):  # the innermost frame that is the policy's or ours is `did_you_mean`
        asked(plugin(tmp_path, "from kvassay.errors import did_you_mean; did_you_mean('x', 3)"))


def test_a_built_in_policys_fault_is_not_dressed_up() -> None:
    with pytest.raises(ZeroDivisionError), answering(registry.make("knorm"), "score", 0):
        _ = 1 // 0


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit"])
def test_an_interruption_stays_one(tmp_path: Path, error: str) -> None:
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        asked(plugin(tmp_path, f"raise {error}"))


def test_a_typed_error_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"^policy 'vnorm' touched keys of layer 0 without declaring it"):
        asked(plugin(tmp_path, "return layer.keys"))


@pytest.mark.parametrize(
    ("name", "arm"),
    [
        ("streaming(sink=4)", "streaming keep=4"),
        ("streaming(sink=4)+int8", "streaming+int8 keep=4"),
        ("streaming(keep=3,sink=3)+exact_mass(read=0.5)", "streaming(keep=3, sink=3)+exact_mass(read=0.5) keep=4"),
    ],
)
def test_a_budget_that_leaves_nothing_names_the_arm(name: str, arm: str) -> None:
    with pytest.raises(BudgetError, match=r"always keeps sink=. tokens") as caught:
        asked(registry.parse(name))
    assert str(caught.value).startswith(f"arm '{arm}': policy 'streaming' always keeps")


@pytest.mark.parametrize("value", ["many", None, float("nan"), float("inf")])
def test_a_fact_is_a_finite_number(value: Any) -> None:
    policy = registry.parse("snapkv")
    assert checked_edits(policy, Decision(facts={"share": 0.5, "count": 3})).facts["count"] == 3
    with pytest.raises(PolicyError, match=rf"^policy 'snapkv': the fact 'share' must be .* number, got {value!r}"):
        checked_edits(policy, Decision(facts={"share": value}))
