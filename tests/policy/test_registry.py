"""Names, parameters, and third-party policies from a file and from a really installed package."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvassay.cli.policies import policies as command
from kvassay.errors import PolicyError
from kvassay.policy import registry
from kvassay.policy.card import Card, Effect
from kvassay.policy.merge import NearestMerge
from kvassay.policy.quest import Quest
from kvassay.policy.snapkv import SnapKV
from kvassay.policy.svd import Svd

PLUGIN = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
from torch import Tensor
from kvassay.policy.base import Memory, Policy
from kvassay.policy.card import Card, Effect, Evidence
from kvassay.policy.views import LayerView

@dataclass(frozen=True)
class ValueNorm(Policy):
    power: float = 1.0
    card: ClassVar[Card] = Card(name="vnorm", effects=frozenset({Effect.EVICT}), source="test", summary="test",
                                evidence=frozenset({Evidence.VALUES}))
    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        return layer.values.norm(dim=-1) ** self.power
"""


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_every_built_in_has_a_complete_card_of_its_own_name(name: str) -> None:
    found = registry.get(name)
    assert found.card.name == name and found.card.source and found.card.summary
    assert len(Path(sys.modules[found.__module__].__file__ or "").read_text().splitlines()) < 150
    assert found.__doc__ and not found.__doc__.startswith(f"{found.__name__}(")
    policy = registry.make(name)
    assert registry.parse(policy.label) == policy
    registry._check_effects(found, name)
    acts = {Effect.EVICT, Effect.MERGE, Effect.QUANTIZE, Effect.LOW_RANK} & found.card.effects
    assert policy.writes_decide is bool(acts)
    assert policy.writes_read is (Effect.SELECT in found.card.effects)
    assert found.card.exact is not bool(found.card.effects & {Effect.MERGE, Effect.QUANTIZE, Effect.LOW_RANK})


def test_a_name_look_up_imports_that_policy_alone() -> None:
    code = (
        "import sys; from kvassay.policy import registry; registry.names(); assert 'torch' not in sys.modules; "
        "registry.get('knorm'); loaded = {m for m in sys.modules if m.startswith('kvassay.policy.')}; "
        "assert not loaded & {'kvassay.policy.quest', 'kvassay.policy.snapkv', 'kvassay.policy.svd'}, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "text, policy",
    [
        ("snapkv", SnapKV()),
        (" snapkv( window = 32 ,kernel=7) ", SnapKV(32, 7)),
        ("svd(rank=0.25, domain=post_rope)", Svd(0.25, domain="post_rope")),
        ("svd(rank=1)", Svd(1.0)),
        ("quest(heads='sum')", Quest(heads="sum")),
        ("nearest-merge(similarity=-0.5)", NearestMerge(similarity=-0.5)),
        ("snapkv()", SnapKV()),
    ],
)
def test_text_becomes_a_policy_with_typed_parameters(text: str, policy: object) -> None:
    made = registry.parse(text)
    assert made == policy
    for field in dataclasses.fields(made):  # type: ignore[arg-type]
        assert type(getattr(made, field.name)) is type(getattr(policy, field.name))


@pytest.mark.parametrize(
    "text, message",
    [
        ("snapvk", r"unknown policy 'snapvk' \(did you mean 'snapkv'\?\)"),
        ("zzz", r"unknown policy 'zzz' \(known: adakv-snapkv, "),
        ("snapkv(windw=3)", r"'snapkv' has no parameter 'windw' \(did you mean 'window'\?\)"),
        ("dense(window=3)", r"'dense' has no parameter 'window' \(it has none\)"),
        ("snapkv(window=x)", r"'snapkv': parameter window='x' is not of type int"),
        ("snapkv(window=1.5)", r"parameter window='1.5' is not of type int"),
        ("svd(rank=half)", r"parameter rank='half' is not of type float"),
        ("quest(heads=mean)", r"parameter heads='mean' is not one of 'max', 'sum', 'q'"),
        ("snapkv(window)", r"'window' is not of the form parameter=value"),
        ("snapkv(window=)", r"'window=' is not of the form parameter=value"),
        ("snapkv(window=3, window=4)", r"parameter 'window' is given twice"),
        ("snapkv(window=3", r"not of the form name or name\("),
        ("", r"policy '' is not of the form"),
        ("snapkv(window=0)", r"window=0, must be at least 1"),
    ],
)
def test_what_is_wrong_is_said_on_one_line(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        registry.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("snapvk", r"unknown policy 'snapvk' \(did you mean 'snapkv'\?\)"),
        ("snapkv+int9~shuffled", r"unknown policy 'int9'"),
        ("none.py:Mine", r"policy '/base/none.py:Mine': there is no file /base/none.py"),
        ("none.py", r"name a class of the file, e.g. none.py:MyPolicy"),
        ("snapkv(window", r"is not of the form"),
        ("snapkv+", r"part 2 of 2 is empty"),
    ],
)
def test_names_are_checked_without_an_import(text: str, message: str) -> None:
    code = (
        f"import sys\nfrom pathlib import Path\nfrom kvassay.policy import registry\n"
        f"try:\n    registry.check_names({text!r}, Path('/base'))\n"
        "except registry.PolicyError as error:\n    print(error)\n"
        "registry.check_names('snapkv~flipped(window=0)+int8')\n"
        "assert not {m for m in sys.modules if m.startswith('kvassay.policy.') and 'registry' not in m}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.search(message, done.stdout)


@pytest.mark.parametrize("value", [True, 1.5, None, [3]])
def test_python_values_are_checked_too(value: object) -> None:
    with pytest.raises(PolicyError, match="is not of type int"):
        registry.make("snapkv", window=value)


class TestFile:
    def write(self, folder: Path, text: str, name: str = "mine.py") -> str:
        (folder / name).write_text(text)
        return str(folder / name)

    def test_a_class_in_a_file_is_a_policy(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, PLUGIN)
        policy = registry.parse(f"{path}:ValueNorm(power=2)")
        assert policy.card.name == "vnorm" and policy.parameters == {"power": 2.0}
        assert type(policy) is registry.get(f"{path}:ValueNorm")
        assert registry.get(f"{path}:ValueNorm~flipped").card.name == "vnorm~flipped"

    def test_a_file_in_the_home_folder_is_no_twin(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.write(tmp_path, PLUGIN)
        monkeypatch.setenv("HOME", str(tmp_path))
        for base in (None, tmp_path / "elsewhere"):
            assert registry.parse("~/mine.py:ValueNorm", base).card.name == "vnorm"

    @pytest.mark.parametrize("name, owner", [("snapkv", SnapKV), ("recency", registry.get("recency"))])
    def test_a_copied_built_in_must_take_another_name(self, tmp_path: Path, name: str, owner: type) -> None:
        """Under its old name it would pass for the original, or not run at all where that one always runs."""
        copied = Path(sys.modules[owner.__module__].__file__ or "").read_text()
        path = self.write(tmp_path, copied)
        said = (
            rf"mine.py defines a policy named '{name}', and kvassay has one of that name already; "
            rf'change name="{name}" in its card, say to name="my-{name}"'
        )
        with pytest.raises(PolicyError, match=said):
            registry.get(f"{path}:{owner.__name__}")
        renamed = self.write(tmp_path, copied.replace(f'name="{name}"', f'name="my-{name}"'), "renamed.py")
        assert registry.get(f"{renamed}:{owner.__name__}").card.name == f"my-{name}"
        again = self.write(tmp_path, f"from {owner.__module__} import {owner.__name__}", "again.py")
        assert registry.get(f"{again}:{owner.__name__}") is owner

    def test_two_files_of_the_same_name_do_not_mix(self, tmp_path: Path) -> None:
        paths = []
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir()
            paths.append(self.write(tmp_path / folder, PLUGIN.replace('"vnorm"', f'"vnorm-{folder}"')))
        assert [registry.get(f"{p}:ValueNorm").card.name for p in paths] == ["vnorm-a", "vnorm-b"]

    @pytest.mark.parametrize(
        "text, attribute, message",
        [
            (PLUGIN, "ValueNrm", r"no class 'ValueNrm' in the file \(did you mean 'ValueNorm'\?\)"),
            (PLUGIN.replace("(frozen=True)", ""), "ValueNorm", "is not a frozen dataclass"),
            (PLUGIN.replace("@dataclass(frozen=True)", ""), "ValueNorm", "is not a frozen dataclass"),
            (PLUGIN.replace("card: ClassVar[Card]", "label_: ClassVar[Card]"), "ValueNorm", "has no card"),
            (PLUGIN.replace("(Policy)", ""), "ValueNorm", "is not a subclass of kvassay.policy.base.Policy"),
            ("x = 3", "x", "is not a subclass"),
            ("raise RuntimeError('first\\nsecond')", "X", "importing the file failed: RuntimeError: first$"),
            ("import nowhere_to_be_found", "X", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
            ("def broken(:", "X", "SyntaxError"),
            (PLUGIN.replace("def score", "def scores"), "ValueNorm", "effect 'evict', .*; write `score` or `decide`$"),
            (PLUGIN.replace("Effect.EVICT", "Effect.SELECT"), "ValueNorm", "effect 'select', .*; write `read`$"),
            (PLUGIN.replace("Effect.EVICT", "Effect.MERGE"), "ValueNorm", "effect 'merge', .*; write `decide`$"),
            (PLUGIN.replace("Effect.EVICT", "Effect.QUANTIZE"), "ValueNorm", "effect 'quantize', .*; write `decide`$"),
            (PLUGIN.replace("Effect.EVICT", "Effect.LOW_RANK"), "ValueNorm", "'low_rank', .* `decide` or `project`$"),
            (
                re.sub(r"def score\(self, .*?\)", "def score(self, layer)", PLUGIN),
                "ValueNorm",
                r"class ValueNorm: score\(self, layer\).* must take \(self, layer, memory\)$",
            ),
            (PLUGIN.replace('summary="test",', 'summary="test", gaps=("x",),'), "ValueNorm", "gaps are listed"),
        ],
    )
    def test_faults_are_named_on_one_line(self, tmp_path: Path, text: str, attribute: str, message: str) -> None:
        with pytest.raises(PolicyError, match=message) as caught:
            registry.get(f"{self.write(tmp_path, text)}:{attribute}")
        assert "\n" not in str(caught.value) and "mine.py" in str(caught.value)

    @pytest.mark.parametrize("effect, method", [("SELECT", "read"), ("QUANTIZE", "decide"), ("LOW_RANK", "project")])
    def test_a_class_that_writes_what_its_card_says_passes(self, tmp_path: Path, effect: str, method: str) -> None:
        text = PLUGIN.replace("Effect.EVICT", f"Effect.{effect}")
        text = re.sub(r"def score\(self, .*?\)", f"def {method}(self, *given)", text)
        assert registry.get(f"{self.write(tmp_path, text)}:ValueNorm").card.effects == {Effect[effect]}

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(PolicyError, match=r"there is no file .*gone\.py"):
            registry.get(f"{tmp_path}/gone.py:X")

    def test_a_file_that_failed_is_tried_again(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, "raise RuntimeError")
        with pytest.raises(PolicyError):
            registry.get(f"{path}:ValueNorm")
        Path(path).write_text(PLUGIN)
        os.utime(path, (0, 0))
        assert registry.get(f"{path}:ValueNorm").card.name == "vnorm"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has really installed a package with three entry points, two of them broken."""
    root = tmp_path_factory.mktemp("plugin")
    package = root / "source" / "vnorm_policy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PLUGIN)
    (package / "broken.py").write_text("raise RuntimeError('no licence')")
    (root / "source" / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "vnorm-policy"\nversion = "1.0"\n'
        f'[project.entry-points."{registry.GROUP}"]\nvnorm = "vnorm_policy:ValueNorm"\n'
        'broken = "vnorm_policy.broken:X"\nother = "vnorm_policy:ValueNorm"\n'
    )
    target = root / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", str(target), str(root / "source")], check=True)
    return target


def in_process(installed: Path, code: str, *arguments: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True, check=True)
    return done.stdout


def test_an_installed_package_adds_policies_and_a_broken_one_hides_none(installed: Path) -> None:
    out = in_process(installed, "from kvassay.cli.main import main; main()", "policies", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert rows["vnorm"]["evidence"] == ["values"] and rows["vnorm"]["parameters"]["power"]["default"] == 1.0
    assert rows["broken"]["error"].endswith("cannot be loaded: RuntimeError: no licence")
    assert "its card is named 'vnorm'" in rows["other"]["error"]
    assert set(registry.BUILT_IN) < set(rows)


def test_an_installed_policy_is_made_by_name(installed: Path) -> None:
    out = in_process(installed, "from kvassay.policy.registry import parse; print(parse('vnorm(power=3)').label)")
    assert out.strip() == "vnorm(power=3.0)"


def test_an_entry_point_may_not_take_a_built_in_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint("snapkv", "x:Y", group)])
    with pytest.raises(PolicyError, match=r"'snapkv = x:Y' \(kvassay.policies\) takes the name of the built-in"):
        registry.names()


class TestCommand:
    def test_json_lists_every_card(self) -> None:
        done = CliRunner().invoke(command, ["--json"])
        rows = {row["name"]: row for row in json.loads(done.output)}
        assert set(registry.BUILT_IN) <= set(rows)
        assert rows["kivi"]["exact"] is False and rows["kivi"]["approximates"] == ["keys", "values"]
        assert rows["paged-eviction"]["reconstruction"] is True and rows["paged-eviction"]["gaps"]
        assert rows["snapkv"]["budgets"] == ["keep_tokens"] and rows["snapkv"]["when"] == ["after_prefill"]
        assert rows["hindsight"]["reference"] is True
        assert set(rows["dense"]) >= {f.name for f in dataclasses.fields(Card)}

    def test_the_table_names_every_policy_and_marks_yardsticks(self) -> None:
        done = CliRunner().invoke(command, env={"COLUMNS": "100"})
        first = [line.split()[0].rstrip("†‡§") for line in done.output.splitlines() if line.strip()]
        assert set(registry.BUILT_IN) <= set(first)
        assert all(marked in done.output for marked in ("hindsight†", "paged-eviction‡", "kvpress§"))

    def test_one_card_with_its_parameters(self) -> None:
        done = CliRunner().invoke(command, ["snapkv"], env={"COLUMNS": "200"})
        assert "window=64 (int)" in done.output and "2404.14469" in done.output
        card = json.loads(CliRunner().invoke(command, ["snapkv~flipped", "--json"]).output)
        assert card["name"] == "snapkv~flipped" and card["parameters"]["kernel"] == {"type": "int", "default": 5}
        card = json.loads(CliRunner().invoke(command, ["quest", "--json"]).output)
        assert card["parameters"]["heads"] == {"type": "max | sum | q", "default": "max"}

    def test_an_unknown_name_is_an_error_of_the_input(self) -> None:
        done = CliRunner().invoke(command, ["snapvk"])
        assert isinstance(done.exception, PolicyError)
