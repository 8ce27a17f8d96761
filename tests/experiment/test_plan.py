"""What is refused before anything runs, and what a key depends on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvassay.errors import ExperimentError
from kvassay.experiment.arms import describe_arms
from kvassay.experiment.code import replay_code
from kvassay.experiment.plan import Plan, arm_key, make_plan, options_for
from kvassay.experiment.quick import quick_experiment
from kvassay.experiment.schema import Experiment, load_experiment
from kvassay.policy.card import Prefill
from kvassay.policy.registry import make
from kvassay.record.options import RecordOptions
from tests.experiment.test_code import PLUGIN
from tests.experiment.test_schema import GOOD, write


def plan_of(folder: Path, *changes: tuple[str, str], extra: str = "") -> Plan:
    text = GOOD
    for before, after in changes:
        assert before in text
        text = text.replace(before, after, 1)
    file = write(folder, text + extra)
    return make_plan(load_experiment(file), file.name, folder)


def test_a_plan_holds_every_arm_and_unit(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, ('["smollm2-135m"]', '["smollm2-135m", "gemma-3-270m"]'))
    labels = [arm.label for arm in plan.arms]
    assert labels[:3] == ["dense", "dense'", "random keep=0.25"]
    assert "snapkv(window=16) keep=0.25" in labels and "exact_mass read=0.25" in labels
    assert [unit.title for unit in plan.units][4:6] == [
        "smollm2-135m, kv_short 2k, context 5",
        "gemma-3-270m, kv_short 2k, context 1",
    ]
    assert len(plan.units) == 10 and len(plan.trace_sets) == 2


MISTAKES = {
    "unknown policy": (('"snapkv(window=16)"', '"snapvk"'), "mine.toml: [arms] policies: unknown policy 'snapvk' (did"),
    "unknown parameter": (("window=16", "windw=16"), "no parameter 'windw' (did you mean 'window'?)"),
    "parameter of another type": (("window=16", "window=x"), "parameter window='x' is not of type int"),
    "budget in words": (("keep=0.25", "keep=half"), "mine.toml: [arms] budgets: budget 'keep=half'"),
    "budget unit": (("keep=0.25", "kept=0.25"), "[arms] budgets: budget 'kept=0.25': unit 'kept' is unknown"),
    "candidate twice": (
        ('["snapkv(window=16)"]', '["knorm", "knorm"]'),
        "[arms] knorm keep=0.25: listed twice",
    ),
    "unit no method honours": (
        ("keep=0.25", "window=64"),
        "[arms] budgets: policy 'random' takes no per_window budget",
    ),
    "unknown workload": (('"kv_short"', '"kv_shrot"'), "[[workload]] 1: unknown workload 'kv_shrot' (did you mean"),
    "budget below protection": (
        ("keep=0.25", "keep=0.01"),
        "[[workload]] 1 (kv_short, 2048 tokens), arm 'random keep=0.01': budget keep=0.01 gives 20 of 2048 tokens",
    ),
    "beyond the native context": (
        ('"2k"', '"8k"'),
        "[[workload]] 1: length 8192 leaves no room for a question in the native context of smollm2-135m, 8192 tokens",
    ),
    "unknown model": (
        ("smollm2-135m", "smolm2-135m"),
        "[experiment] models: 'smolm2-135m' is no folder, no Hugging Face id (owner/name) and no embedded model "
        "(did you mean 'smollm2-135m'?)",
    ),
    "model like none": (("smollm2-135m", "gpt2"), "no embedded model (known: gemma-3-270m, smollm2-135m)"),
    "layout without weights": (
        ("smollm2-135m", "llama-3.1-8b"),
        "[experiment] models: 'llama-3.1-8b' is a layout in the registry, without weights; to run it, name the "
        "folder or the Hugging Face id of its weights (meta-llama/",
    ),
    "second model": (('"smollm2-135m"]', '"smollm2-135m", "./none"]'), "[experiment] models: './none' is no folder"),
    "draft model": (
        ("[arms]", '[speculation]\ndrafters = ["ngram", "./none"]\n[arms]'),
        "[speculation] drafters: './none' is no folder",
    ),
    "own prefill of an unknown policy": (
        ("budgets =", 'own_prefill = ["pf8"]\nbudgets ='),
        "[arms] own_prefill: unknown policy 'pf8' (did you mean 'fp8'?)",
    ),
    "own prefill twice": (
        ("budgets =", 'own_prefill = ["fp8", "fp8"]\nbudgets ='),
        "[arms] fp8 own-prefill: listed twice",
    ),
    "unknown calibration text": (
        ("[arms]", '[calibration]\nworkload = "porse"\n[arms]'),
        "[calibration] workload: unknown workload 'porse' (did you mean 'prose'?)",
    ),
    "imported calibration text": (
        ("[arms]", '[calibration]\nworkload = "jsonl"\n[arms]'),
        "[calibration] workload: 'jsonl' is imported, it has no text set apart",
    ),
    "missing plug-in": (('"snapkv(window=16)"', '"none.py:Mine"'), "there is no file"),
}


@pytest.mark.parametrize(("change", "message"), MISTAKES.values(), ids=MISTAKES)
def test_refused_on_one_line(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError) as caught:
        plan_of(tmp_path, change)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("mine.toml: ")


def test_two_files_with_one_name_are_not_called_one_listed_twice(tmp_path: Path) -> None:
    for name in ("mine.py", "yours.py"):
        (tmp_path / name).write_text(PLUGIN.format(factor="1"))
    with pytest.raises(
        ExperimentError, match=r"\[arms\] mine keep=0.25: the name of two different policies; change it"
    ):
        plan_of(tmp_path, ('["snapkv(window=16)"]', '["mine.py:Mine", "yours.py:Mine"]'))


def test_without_always_on_dense_must_be_listed(tmp_path: Path) -> None:
    change = ("budgets =", "always_on = false\nbudgets =")
    with pytest.raises(ExperimentError, match="policies must list 'dense'"):
        plan_of(tmp_path, change)
    plan = plan_of(tmp_path, change, ('"snapkv(window=16)"', '"dense", "snapkv(window=16)"'))
    assert [arm.label for arm in plan.arms] == ["dense", "snapkv(window=16) keep=0.25"]


def test_a_candidate_that_runs_anyway_runs_once(tmp_path: Path) -> None:
    labels = [arm.label for arm in plan_of(tmp_path, ('"snapkv(window=16)"', '"random"')).arms]
    assert labels.count("random keep=0.25") == 1


def test_what_merges_runs_beside_its_twin_that_does_not(tmp_path: Path) -> None:
    merging = '["selkv", "knorm", "nearest-merge(scorer=snapkv)", "selkv+int8", "selkv~shuffled"]'
    plan = plan_of(tmp_path, ('["snapkv(window=16)"]', merging))
    own = [arm.policy.label for arm in plan.arms if arm.policy.label not in {"dense", "random", "recency", "streaming"}]
    assert own[-8:] == [
        "selkv",
        "selkv~merge-off",
        "knorm",
        "nearest-merge(scorer=snapkv)",
        "nearest-merge~merge-off(scorer=snapkv)",
        "selkv+int8",
        "selkv~merge-off+int8",
        "selkv~shuffled",
    ]
    listed = plan_of(tmp_path, ('["snapkv(window=16)"]', '["selkv", "knorm", "selkv~merge-off"]'))
    assert [arm.policy.label for arm in listed.arms][-3:] == ["selkv", "knorm", "selkv~merge-off"]


def test_each_policy_takes_the_budgets_of_its_unit(tmp_path: Path) -> None:
    change = (
        '["snapkv(window=16)"]\nbudgets = ["keep=0.25"]',
        '["knorm", "quest"]\nbudgets = ["keep=0.25", "read=0.125"]',
    )
    labels = [arm.label for arm in plan_of(tmp_path, change).arms]
    assert [label for label in labels if label.startswith(("knorm", "quest"))] == [
        "knorm keep=0.25", "quest read=0.25", "quest read=0.125",
    ]  # fmt: skip
    assert "random keep=0.125" in labels and "exact_mass read=0.125" in labels


def test_own_prefills_come_last_each_at_the_first_budget_it_can_honour(tmp_path: Path) -> None:
    change = (
        'budgets = ["keep=0.25"]',
        'own_prefill = ["fp8", "svd", "knorm"]\nbudgets = ["read=0.125", "keep=0.5", "keep=0.25"]',
    )
    plan = plan_of(tmp_path, change)
    assert [arm.label for arm in plan.arms][-3:] == ["fp8 own-prefill", "svd own-prefill", "knorm keep=0.5 own-prefill"]
    assert [arm.prefill for arm in plan.arms][-4:] == [Prefill.SHARED_DENSE, *[Prefill.OWN] * 3]
    assert "fp8" in [arm.label for arm in plan.arms]
    marked = [info.label for info in describe_arms(plan.arms, plan.experiment) if info.own_prefill]
    assert marked == ["fp8 own-prefill", "svd own-prefill", "knorm keep=0.5 own-prefill"]


def test_only_what_learns_offline_asks_for_a_calibration(tmp_path: Path) -> None:
    table = "\n[calibration]\nlength = 512\nseed = 9\n"
    assert plan_of(tmp_path, extra=table).calibration is None
    found = plan_of(tmp_path, ('"snapkv(window=16)"', '"svd(rank=0.25)"'), extra=table).calibration
    assert found is not None and (found.length, found.seed, found.workload) == (512, 9, "prose_numbered")


def test_beyond_native_can_be_allowed(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, ('"2k"', '"8k"'), extra="\n[protocol]\nallow_beyond_native = true\n")
    assert plan.options.allow_beyond_native and plan.protocol.allow_beyond_native


def test_plug_ins_lie_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN.format(factor="1.0"), encoding="utf-8")
    monkeypatch.chdir("/")
    plan = plan_of(tmp_path, ('"snapkv(window=16)"', '"mine.py:Mine(strength=2)"'))
    assert "mine(strength=2) keep=0.25" in [arm.label for arm in plan.arms]


@pytest.fixture
def quick() -> Callable[..., Experiment]:
    def make(
        model: str = "smollm2-135m", length: int = 2048, budgets: tuple[str, ...] = ("keep=0.5",), own: bool = False
    ) -> Experiment:
        return quick_experiment(
            model,
            ["snapkv(window=16)"],
            budgets,
            workloads=["kv_short"],
            length=length,
            contexts=1,
            questions=2,
            own_prefill=own,
        )

    return make


def test_try_names_its_folder_by_what_is_asked(quick: Callable[..., Experiment]) -> None:
    name = quick().experiment.name
    assert name.startswith("try-smollm2-135m-snapkv-window-16-")
    assert quick().experiment.name == name
    others = {quick(length=1024).experiment.name, quick(budgets=("keep=0.25",)).experiment.name}
    assert len(others | {name, quick(own=True).experiment.name}) == 4


def test_try_refuses_as_a_file_does(quick: Callable[..., Experiment]) -> None:
    with pytest.raises(ExperimentError, match=r"^kvassay try: \[arms\] budgets: "):
        make_plan(quick(budgets=("keep=0",)), "kvassay try", Path())


def test_a_recording_holds_the_taps_that_policies_are_shown_of_it() -> None:
    """Hidden states that a policy observes step by step come from the replay's own passes."""
    base = RecordOptions()
    assert options_for([make("epikv"), make("epikv-uncal"), make("svd")], base).taps == ()
    assert options_for([make("epikv"), make("dynacalkv")], base).taps == ("layer_input",)


def test_compositions_take_the_budgets_of_their_parts_and_have_keys_of_their_own(tmp_path: Path) -> None:
    change = (
        '["snapkv(window=16)"]',
        '["snapkv+int8", "quest+int8", "snapkv(keep=0.5)+exact_mass", "mine.py:Mine+int8"]',
    )
    (tmp_path / "mine.py").write_text(PLUGIN.format(factor="1"))
    plan = plan_of(tmp_path, change)
    own = [arm for arm in plan.arms if "+" in arm.policy.card.name]
    assert [arm.label for arm in own] == [
        "snapkv+int8 keep=0.25",
        "quest+int8 read=0.25",
        "snapkv(keep=0.5)+exact_mass read=0.25",
        "mine+int8 keep=0.25",
    ]
    keys = [arm_key(arm) for arm in own]
    assert keys[0]["policy"] == "kvassay.policy.snapkv:SnapKV+kvassay.policy.int8:Int8"
    assert keys[2]["parameters"]["snapkv.keep_tokens"] == 0.5
    assert replay_code([own[0].policy]) != replay_code([own[1].policy])  # SnapKV's code is in one, Quest's in the other
    with pytest.raises(ExperimentError, match=r"arm 'snapkv\(keep=0.01\)\+exact_mass .*gives 20 of 2048"):
        plan_of(tmp_path, (change[0], '["snapkv(keep=0.01)+exact_mass"]'))
