from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvassay.errors import GateError
from kvassay.gate.issue import draft, write_issues
from kvassay.gate.session import judge_run
from kvassay.measure.result import RECLAIM_MODES
from kvassay.policy.needs import TABLES, engine_needs
from kvassay.policy.registry import BUILT_IN, make
from tests.gate import made
from tests.gate.folder import write_run
from tests.gate.made import CAND, everywhere


@dataclass(frozen=True)
class Facts:
    effects: tuple[str, ...] = ()
    when: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    acts_on: tuple[str, ...] = ("full",)
    approximates: tuple[str, ...] = ()


def names(facts: Facts, *reclaim: str) -> list[str]:
    return [need.name for need in engine_needs(facts, reclaim)]


NEEDS = {
    "eviction by block": (
        Facts(("evict",), ("after_prefill",)),
        ("whole_block",),
        ["shared block table", "validity masks", "policy call"],
    ),
    "eviction per head": (
        Facts(("evict",), ("every_step",), ("attention",)),
        ("per_head_tables",),
        ["per-head block tables", "validity masks", "hook: attention", "policy call"],
    ),
    "selection": (
        Facts(("select",), ("block_full",), ("keys", "query")),
        (),
        ["block-list attention", "side cache", "hook: query", "policy call"],
    ),
    "merging": (
        Facts(("merge", "evict"), ("after_prefill",)),
        ("compaction",),
        ["compaction", "validity masks", "bias in the kernel", "policy call"],
    ),
    "quantisation": (Facts(("quantize",), ("every_n",)), (), ["packed storage", "policy call"]),
    "low rank": (
        Facts(("low_rank",), ("offline", "after_prefill")),
        (),
        ["low-rank rebuild", "offline artefact", "policy call"],
    ),
    "nothing": (Facts(("none",)), (), []),
}


@pytest.mark.parametrize(("facts", "reclaim", "expected"), NEEDS.values(), ids=NEEDS)
def test_what_the_engine_needs_follows_from_card_and_reclaim_mode(
    facts: Facts, reclaim: tuple[str, ...], expected: list[str]
) -> None:
    assert names(facts, *reclaim) == expected


def test_real_cards_have_needs_and_every_mode_has_a_table() -> None:
    assert tuple(TABLES) == RECLAIM_MODES
    quest = [need.name for need in engine_needs(make("quest").card, ())]
    assert quest[:2] == ["block-list attention", "side cache"]
    for name in BUILT_IN:
        card = make(name).card
        assert bool(engine_needs(card, ())) == (card.effects != {"none"}), name


@pytest.fixture
def gate_file(tmp_path: Path) -> Path:
    file = tmp_path / "gate.toml"
    file.write_text(made.GATE, encoding="utf-8")
    return file


def test_a_promoted_arm_gets_a_draft(tmp_path: Path, gate_file: Path) -> None:
    results = write_run(tmp_path / "run")
    judgement = judge_run(results, gate_file, exploratory=True)
    (path,) = write_issues(results, judgement, tmp_path / "issues")
    assert path == tmp_path / "issues" / "cand-keep-0.25.md"
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# Implement cand keep=0.25\n\nSummary of cand.\n")
    assert "> **EXPLORATORY, not a test of anything declared beforehand: gate 'hand' was never declared" in text
    quality = next(line for line in text.splitlines() if "tiny, copy 2k | quality top1" in line)
    assert quality.startswith(
        "| tiny, copy 2k | quality top1 (fraction, arm minus dense) | at least -0.1 | -0.02 | -0.0"
    )
    assert quality.endswith(" | measured | yes |")
    assert "| at least 0.5 | 0.75 | - | measured | yes (by compaction) |" in text
    assert "- **compaction**: kept tokens are moved together" in text
    assert "shared block table" not in text  # by whole blocks it freed nothing
    assert "- sliding, latent, pooled, index state: the method leaves it alone" in text
    assert "- work of another kind than needle_multikey, copy, tracking, chain" in text
    commands = "kvassay run run/resolved.toml --gate run/gate-exploratory.toml --out again --exploratory"
    assert f"\n{commands}\nkvassay show again\n" in text
    assert "\n\n\n" not in text


def test_arms_that_were_not_promoted_get_none(tmp_path: Path, gate_file: Path) -> None:
    results = write_run(tmp_path / "run", everywhere(blocks={CAND: 0.0}))
    judgement = judge_run(results, gate_file, exploratory=True)
    assert write_issues(results, judgement, tmp_path / "issues") == []
    assert not (tmp_path / "issues").exists()
    with pytest.raises(GateError, match=r"'cand keep=0\.25' was not promoted: reject: "):
        draft(results, judgement, judgement.overall[0])
