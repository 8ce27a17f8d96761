"""Each likely mistake in a gate file, and the one line it gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvassay.cache.reclaim import MODES
from kvassay.errors import GateError
from kvassay.gate import schema
from kvassay.gate.roles import KINDS, TOGETHER, VETO_ONLY
from kvassay.gate.schema import EXAMPLE, load_gate
from kvassay.measure.result import RECLAIM_MODES
from kvassay.workload.registry import WORKLOADS
from tests.gate.made import GATE

MISTAKES = {
    "misspelt key": ("margin = 0.1", "margn = 0.1", "[[quality]] 1: unknown key 'margn' (did you mean 'margin'?)"),
    "misspelt table": ("[roles]", "[role]", "unknown key 'role' (did you mean 'roles'?)"),
    "no evidence said": (
        'margin = 0.1\nevidence = ["measured"]',
        "margin = 0.1",
        "[[quality]] 1: missing key 'evidence'",
    ),
    "modelled quality": (
        'margin = 0.1\nevidence = ["measured"]',
        'margin = 0.1\nevidence = ["modelled"]',
        "[[quality]] 1: evidence entry 1: Input should be 'measured', got 'modelled'",
    ),
    "unknown metric": ('"top1"', '"top2"', "[[quality]] 1: metric: unknown metric 'top2' (did you mean 'top1'?)"),
    "no direction": (
        '"top1"',
        '"generated_tokens"',
        "[[quality]] 1: metric: unknown metric 'generated_tokens' (known: ",
    ),
    "margin of nothing": ("margin = 0.1", "margin = 0", "[[quality]] 1: margin: Input should be greater than 0"),
    "margin of everything": (
        "margin = 0.1",
        "margin = 15",
        "[[quality]] 1: margin = 15 lets everything pass: top1 can lose 1 at most",
    ),
    "unknown workload": ('"copy"', '"coppy"', "[roles] promote: unknown workload 'coppy' (did you mean 'copy'?)"),
    "needle promotes": (
        '["needle_multikey", ',
        '["needle_single", "needle_multikey", ',
        "[roles] promote: 'needle_single' (single-needle) may veto, never promote; move it to veto",
    ),
    "too few kinds": (
        '"copy", "tracking", "chain"]',
        '"chain"]',
        "[roles] promote: these alone may not promote, something is missing (copy: copy; tracing: tracking)",
    ),
    "both roles": (
        'veto = ["needle_single"]',
        'veto = ["copy"]',
        "[roles] 'copy' is in promote and in veto; choose one",
    ),
    "too few contexts": (
        "contexts = 8",
        "contexts = 4",
        "[samples] contexts: Input should be greater than or equal to 5, got 4",
    ),
    "a mode that is none": (
        '"compaction"',
        '"compact"',
        "[[reduction]] 1: reclaim entry 2: Input should be 'whole_block', 'per_layer_tables', ",
    ),
    "freed by nothing": (
        'reclaim = ["whole_block", "compaction"]\n',
        "",
        '[[reduction]] 1: freed_bytes needs reclaim, e.g. reclaim = ["whole_block"]',
    ),
    "traffic by reclaiming": (
        '"freed_bytes"',
        '"read_bytes"',
        "[[reduction]] 1: read_bytes takes no reclaim: what is not read stays where it is",
    ),
    "per cent": ("at_least = 0.5", "at_least = 50", "[[reduction]] 1: at_least: Input should be less than 1, got 50"),
    "unjudged workload": (
        'metric = "top1"',
        'metric = "top1"\nworkloads = ["copy"]',
        "no [[quality]] holds for the workload 'needle_multikey', so it would judge nothing",
    ),
    "unknown baseline": (
        "[roles]",
        '[baselines]\narms = ["randon"]\n[roles]',
        "[baselines] arms: unknown policy 'randon' (did you mean 'random'?)",
    ),
    "misspelt key after another mistake": (
        "contexts = 8",
        "contexts = 4\n[reportt]\nx = 1",
        "unknown key 'reportt'",
    ),
    "unknown spread": (
        "contexts = 8",
        "contexts = 8\nspread = { topp = 0.2 }",
        "[samples] spread: unknown metric 'topp' (did you mean 'top1'?)",
    ),
    "gain of what cannot be better": (
        'name = "hand"',
        'name = "hand"\nsuspect_above = { kl = 0.1 }',
        "[gate] suspect_above: unknown metric 'kl' (known: nll, task, top1)",
    ),
    "gain of all": (
        'name = "hand"',
        'name = "hand"\nsuspect_above = { top1 = 1 }',
        "[gate] suspect_above: top1: 1 suspects nothing: top1 can gain 1 at most",
    ),
    "gain below nothing": (
        'name = "hand"',
        'name = "hand"\nsuspect_above = { nll = -0.1 }',
        "[gate] suspect_above: nll: a gain must be at least 0, not -0.1",
    ),
    "speed on no hardware": (
        "[roles]",
        '[[speed]]\nof = "latency"\nat_least = 1.2\nevidence = ["modelled"]\n[roles]',
        "[[speed]] 1: missing key 'hardware'",
    ),
}


@pytest.mark.parametrize(("before", "after", "message"), MISTAKES.values(), ids=MISTAKES)
def test_one_line_names_file_place_and_what_is_allowed(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in GATE
    file = tmp_path / "gate.toml"
    file.write_text(GATE.replace(before, after, 1), encoding="utf-8")
    with pytest.raises(GateError) as caught:
        load_gate(file)
    assert str(caught.value).startswith(f"{file}: {message}")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(GateError, match=r"none.toml: cannot be read: No such file"):
        load_gate(tmp_path / "none.toml")


def test_the_example_states_every_key_and_every_default() -> None:
    gate = load_gate(EXAMPLE)
    tables = {
        "[gate]": schema.About,
        "[samples]": schema.Samples,
        "[roles]": schema.Roles,
        "[baselines]": schema.Baselines,
        "[[quality]]": schema.Quality,
        "[[reduction]]": schema.Reduction,
        "[[speed]]": schema.Speed,
    }
    text = EXAMPLE.read_text(encoding="utf-8")
    for heading, table in tables.items():
        assert heading in text
        optional = {"workloads", "hardware"} if heading != "[[speed]]" else {"workloads"}
        for key in set(table.model_fields) - optional:
            assert f"{key} =" in text, f"{heading} {key}"
    assert gate.one_of == "reduction" and gate.roles == schema.Roles(promote=gate.roles.promote)
    assert gate.baselines == schema.Baselines()


def test_every_workload_has_a_kind_and_no_promoting_one_is_veto_only() -> None:
    assert set(KINDS) == set(WORKLOADS)
    for name, workload in WORKLOADS.items():
        assert (KINDS[name] in VETO_ONLY) == (workload.role != "promote")
    assert set(TOGETHER) <= set(KINDS.values())


def test_reclaim_modes_are_those_of_the_cache() -> None:
    assert schema.Mode.__args__ == MODES == RECLAIM_MODES
