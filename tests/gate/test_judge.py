"""Each outcome of the order of judgement, on hand-made cells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvassay.gate.evidence import SetEvidence
from kvassay.gate.judge import Judged, excluded, judge
from kvassay.measure.check_outcomes import BEATS
from kvassay.measure.checks import Finding
from kvassay.measure.verdict import Check, Verdict
from tests.gate.made import (
    ARMS,
    CAND,
    DENSE,
    GATE,
    GOOD,
    POOR,
    RANDOM,
    cost,
    everywhere,
    evidence,
    gate,
    latency,
    relabelled,
    with_arm,
)
from tests.rows import SILENT, row


def overall(judged: Judged, arm: str = CAND) -> Verdict:
    (found,) = [verdict for verdict in judged.verdicts if verdict.overall and verdict.arm == arm]
    return found


def part(judged: Judged, trace_set: str = "copy 2k", arm: str = CAND) -> Verdict:
    (found,) = [verdict for verdict in judged.verdicts if verdict.trace_set == trace_set and verdict.arm == arm]
    return found


def check(verdict: Verdict, name: str) -> Check:
    (found,) = [item for item in verdict.checks if item.name == name]
    return found


def test_a_candidate_that_passes_everything_is_promoted() -> None:
    judged = judge(gate(), ARMS, everywhere())
    verdict = overall(judged)
    assert (verdict.outcome, verdict.reason, verdict.line) == ("promote", "", "promote")
    assert verdict.scope == ("tiny; needle_multikey, copy, tracking, chain at 2048 tokens; acts on full layers")
    assert not verdict.exploratory and not verdict.approximate


def test_every_threshold_is_in_the_verdict_with_value_interval_and_unit() -> None:
    found = part(judge(gate(), ARMS, everywhere()))
    quality = check(found, "quality top1")
    assert (quality.threshold, quality.direction, quality.passed, quality.evidence) == (
        -0.1,
        "at_least",
        True,
        "measured",
    )
    assert quality.value == pytest.approx(-0.02)  # (4 x 0.02 + 2 x 0.04) / 8
    assert quality.low is not None and quality.low < -0.02 < (quality.high or 0.0) < 0.0
    assert quality.unit == "fraction, arm minus dense"
    saving = check(found, "freed (whole_block or compaction)")
    assert (saving.threshold, saving.value, saving.passed, saving.note) == (0.5, 0.75, True, "by compaction")
    assert saving.unit == "fraction of the growing layers' dense bytes"
    assert check(found, f"better than {RANDOM}").value == pytest.approx(0.93 - 0.45)
    assert check(found, "better than fp8").note == "fp8 saves less"
    assert check(found, "on the front").passed


def test_baselines_references_and_dense_get_no_verdict() -> None:
    arms = with_arm(relabelled("cand~flipped keep=0.25"))
    assert excluded(gate(), arms) == {
        "dense": "dense, which all are compared with",
        "dense'": "dense, which all are compared with",
        RANDOM: "a baseline",
        "recency keep=0.25": "a baseline",
        "streaming keep=0.25": "a baseline",
        "hindsight keep=0.25": "a reference: no engine could run it",
        "fp8": "a baseline",
        "paged-eviction keep=0.25": "a baseline",
        "cand~flipped keep=0.25": "a control twin of another policy",
    }
    assert {verdict.arm for verdict in judge(gate(), ARMS, everywhere()).verdicts} == {CAND}


@pytest.mark.parametrize(("severity", "outcome"), [("invalid", "invalid"), ("suspect", "suspect"), ("note", "promote")])
@pytest.mark.parametrize("about", [CAND, None])
def test_findings_come_first(severity: str, outcome: str, about: str | None) -> None:
    finding = Finding("bos", severity, about, "three begin tokens")  # type: ignore[arg-type]
    sets = [*everywhere()[1:], evidence("needle_multikey", findings=[finding], top1={CAND: POOR, "cand": POOR})]
    sets = sets if outcome != "promote" else [*everywhere()[1:], evidence("needle_multikey", findings=[finding])]
    verdict = overall(judge(gate(), ARMS, sets))
    assert verdict.outcome == outcome
    if outcome != "promote":
        assert verdict.reason == "tiny, needle_multikey 2k: bos: three begin tokens"


def test_findings_about_another_arm_do_not_touch_this_one() -> None:
    alone = Finding("budget_base", "invalid", RANDOM, "holds all")
    pair = Finding("identical_arms", "suspect", None, "one policy under two names", (RANDOM, "recency keep=0.25"))
    assert overall(judge(gate(), ARMS, everywhere(findings=[alone, pair]))).outcome == "promote"
    mine = Finding("identical_arms", "suspect", None, "one policy under two names", (RANDOM, CAND))
    assert overall(judge(gate(), ARMS, everywhere(findings=[mine]))).outcome == "suspect"


def test_below_the_dense_floor_there_is_no_verdict() -> None:
    sets = [*everywhere()[:3], evidence("chain", passed=False, top1={CAND: POOR})]
    judged = judge(gate(), ARMS, sets)
    assert overall(judged).line == "hold: no verdict on tiny, chain 2k: dense is below its floor"
    assert not [verdict for verdict in judged.verdicts if verdict.workload == "chain"]


def test_better_than_dense_beyond_noise_is_suspect() -> None:
    weak = tuple(value - 0.3 for value in DENSE)
    sets = [*everywhere()[:3], evidence("chain", top1={"dense": weak, "dense'": weak})]
    verdict = overall(judge(gate(), ARMS, sets))
    assert verdict.outcome == "suspect"
    assert verdict.reason.startswith("tiny, chain 2k: better than dense beyond noise: top-1 +0.28, noise 0.0")


@pytest.mark.parametrize(("above", "outcome"), [(0.2, "suspect"), (0.4, "promote")])
@pytest.mark.parametrize("found", [True, False])
def test_a_gain_is_suspect_above_what_the_gate_states(above: float, outcome: str, found: bool) -> None:
    weak = tuple(value - 0.3 for value in DENSE)  # the candidate is 0.28 better
    findings = [Finding(BEATS, "suspect", CAND, "top1 +0.28 (noise 0.01)")] if found else []
    sets = [*everywhere()[:3], evidence("chain", findings=findings, top1={"dense": weak, "dense'": weak})]
    declared = gate(**{'name = "hand"': f'name = "hand"\nsuspect_above = {{ top1 = {above} }}'})
    assert overall(judge(declared, ARMS, sets)).outcome == outcome


def test_a_leak_check_that_fires_is_no_matter_of_size() -> None:
    fired = Finding(BEATS, "invalid", CAND, "leak checks fired: future_query")
    declared = gate(**{'name = "hand"': 'name = "hand"\nsuspect_above = { top1 = 0.9, nll = 9 }'})
    assert overall(judge(declared, ARMS, everywhere(findings=[fired]))).outcome == "invalid"


def test_losing_quality_is_rejected_with_the_numbers() -> None:
    sets = [*everywhere()[:3], evidence("chain", top1={CAND: tuple(value - 0.3 for value in GOOD)})]
    verdict = overall(judge(gate(), ARMS, sets))
    assert verdict.line == "reject: tiny, chain 2k: quality top1 -0.32, at least -0.1 was asked"


def test_an_interval_across_the_margin_is_held_as_underpowered() -> None:
    wide = (0.98, 0.9, 0.98, 0.3, 0.98, 0.9, 0.98, 0.86)
    verdict = overall(judge(gate(), ARMS, [*everywhere()[:3], evidence("chain", top1={CAND: wide})]))
    assert verdict.outcome == "hold"
    assert verdict.reason.startswith("underpowered: tiny, chain 2k: quality top1: 8 contexts leave it between -")


def test_contexts_that_all_agree_are_no_certainty() -> None:
    same = evidence("chain", top1={CAND: DENSE})  # (1 - 0.1)^8 = 0.43: too likely with a true loss of 0.1
    verdict = overall(judge(gate(), ARMS, [*everywhere()[:3], same]))
    assert verdict.outcome == "hold" and verdict.reason.startswith("underpowered: tiny, chain 2k: quality top1: 8")


def test_fewer_contexts_than_planned_may_reject_but_not_promote() -> None:
    planned = gate(GATE.replace("contexts = 8", "contexts = 9"))
    verdict = overall(judge(planned, ARMS, everywhere()))
    assert verdict.outcome == "hold"
    assert verdict.reason.startswith(
        "underpowered: tiny, needle_multikey 2k: quality top1: 8 of 9 planned contexts (and "
    )
    assert overall(judge(planned, ARMS, everywhere(top1={CAND: POOR}))).outcome == "reject"


def test_noise_of_dense_as_wide_as_the_margin_decides_nothing() -> None:
    again = (0.5, 1.0, 1.0, 0.9, 1.0, 0.9, 1.0, 1.0)
    verdict = part(judge(gate(), ARMS, everywhere(top1={"dense'": again})))
    found = check(verdict, "quality top1")
    assert verdict.outcome == "hold" and found.passed is None
    assert found.note.startswith("the margin 0.1 is within noise: dense' reaches 0.")


def test_a_policy_that_frees_nothing_is_rejected() -> None:
    verdict = overall(judge(gate(), ARMS, everywhere(blocks={CAND: 6.4})))
    assert verdict.outcome == "reject"
    assert "freed (whole_block or compaction) 0.05, at least 0.5 was asked (by compaction)" in verdict.reason


def test_only_the_reclaim_modes_of_the_gate_count() -> None:
    shared = gate(GATE.replace('["whole_block", "compaction"]', '["whole_block"]'))
    assert check(part(judge(shared, ARMS, everywhere())), "freed (whole_block)").value == 0.0


def test_freed_bytes_of_the_whole_model_are_scaled_by_its_growing_layers() -> None:
    whole = gate(GATE.replace('layers = "growing"\n', ""))
    sets = everywhere(changes={label: {"retained_bytes_scope": 0.25 * 1024 * 1000.0} for label in ARMS})
    found = check(part(judge(whole, ARMS, sets)), "freed (whole_block or compaction)")
    assert (found.value, found.passed) == (pytest.approx(0.25 * 0.75), False)


def test_no_better_than_random_is_rejected_as_losing_to_it() -> None:
    loser = gate(GATE + "\n[baselines]\nlead = 0.02\n")
    sets = [*everywhere()[:3], evidence("chain", top1={RANDOM: GOOD})]
    verdict = overall(judge(loser, ARMS, sets))
    assert verdict.line == f"reject: tiny, chain 2k: better than {RANDOM} 0, at least 0.02 was asked"


def test_not_told_apart_from_a_baseline_is_held() -> None:
    near = (0.99, 0.9, 0.96, 0.87, 0.98, 0.89, 0.97, 0.87)
    found = part(judge(gate(), ARMS, everywhere(top1={RANDOM: near})))
    assert found.outcome == "hold" and found.reason.startswith(f"underpowered: better than {RANDOM}: 8 contexts leave")


def test_fp8_beats_whoever_saves_no_more_than_it() -> None:
    behind = tuple(value - 0.04 for value in GOOD)
    found = part(judge(gate(), ARMS, everywhere(blocks={CAND: 64.0}, top1={CAND: behind})))
    assert found.reason.startswith("better than fp8 -0.05, at least 0 was asked")
    assert found.outcome == "reject"


def test_a_baseline_that_did_not_run_holds() -> None:
    arms = {label: info for label, info in ARMS.items() if label != "fp8"}
    verdict = overall(judge(gate(), arms, everywhere(arms=tuple(arms))))
    assert verdict.line == "hold: tiny, needle_multikey 2k: better than fp8: did not run at this budget; and 3 more"


def test_off_the_front_of_its_budget_class_is_rejected() -> None:
    better = relabelled("better keep=0.25")
    worse = (0.92, 0.86, 0.93, 0.84, 0.94, 0.86, 0.93, 0.84)  # within the margin, but behind GOOD
    sets = everywhere(arms=(*ARMS, better.label), top1={better.label: GOOD, CAND: worse})
    judged = judge(gate(), with_arm(better), sets)
    assert overall(judged, better.label).outcome == "promote"
    assert overall(judged).outcome == "reject"
    assert "off the front: better keep=0.25 saves as much and answers better" in overall(judged).reason
    assert judged.notes[-1] == "2 arms, each judged at alpha 0.05: not corrected for their number"


def test_arms_of_another_budget_or_comparison_do_not_push_it_off_the_front() -> None:
    best = (0.99, 0.9, 0.99, 0.89, 0.99, 0.9, 0.99, 0.88)
    for other in (relabelled("other keep=0.5"), relabelled("other keep=0.25", exact=False, approximates=("keys",))):
        sets = everywhere(arms=(*ARMS, other.label), top1={other.label: best})
        assert overall(judge(gate(), with_arm(other), sets)).outcome == "promote"


def test_an_approximating_arm_is_judged_apart_and_marked() -> None:
    arms = with_arm(relabelled(CAND, exact=False, approximates=("keys", "values")))
    verdict = overall(judge(gate(), arms, everywhere()))
    assert verdict.outcome == "promote" and verdict.approximate
    assert verdict.scope.endswith("acts on full layers; approximates keys, values")


def test_a_single_needle_vetoes_and_never_promotes() -> None:
    alone = judge(gate(), ARMS, [evidence("needle_single")])
    assert part(alone, "needle_single 2k").line == "hold: passed, but this workload may veto, never promote"
    assert overall(alone).line == (
        "hold: not run on tiny: needle_multikey, copy, tracking, chain; the workloads of promote do so together only"
    )
    assert overall(judge(gate(), ARMS, [*everywhere(), evidence("needle_single")])).outcome == "promote"
    lost = evidence("needle_single", top1={CAND: POOR})
    assert overall(judge(gate(), ARMS, [*everywhere(), lost])).line.startswith("reject: tiny, needle_single 2k")


def test_a_needle_that_every_arm_finds_vetoes_nobody() -> None:
    every = evidence("needle_single", top1={**dict.fromkeys(ARMS, DENSE), CAND: GOOD})
    assert overall(judge(gate(), ARMS, [*everywhere(), every])).outcome == "promote"
    assert [item.name for item in part(judge(gate(), ARMS, [every]), "needle_single 2k").checks] == [
        "quality top1",
        "freed (whole_block or compaction)",
    ]


def test_all_promoting_workloads_are_needed_on_every_model() -> None:
    verdict = overall(judge(gate(), ARMS, [*everywhere(), evidence("copy", model="other")]))
    assert verdict.line == (
        "hold: not run on other: needle_multikey, tracking, chain; the workloads of promote do so together only"
    )


def test_workloads_that_were_not_run_are_named_beside_another_reason_to_hold() -> None:
    verdict = overall(judge(gate(), ARMS, [evidence("copy", top1={CAND: (0.95, 0.75) * 4})]))
    assert verdict.outcome == "hold" and "tiny, copy 2k" in verdict.reason
    assert verdict.reason.endswith(
        "; not run on tiny: needle_multikey, tracking, chain; the workloads of promote do so together only"
    )


def test_sets_without_a_role_or_with_a_visible_question_are_not_judged() -> None:
    sets = [*everywhere(), evidence("prose", top1={CAND: POOR}), evidence("copy", query_aware=True, model="seen")]
    judged = judge(gate(), ARMS, sets)
    assert overall(judged).outcome == "promote"
    assert judged.notes == (
        "tiny, prose 2k: not judged, the gate gives 'prose' no role",
        "seen, copy 2k: not judged, the question was visible while compressing",
    )
    seen = gate(GATE.replace('name = "hand"', 'name = "hand"\nquery_aware = true'))
    assert overall(judge(seen, ARMS, sets)).reason.startswith("not run on seen")


def test_what_holds_for_several_trace_sets_is_said_once() -> None:
    sets = everywhere()
    everywhere_one = Finding("identical_arms", "note", None, "a and b are one")
    twice = Finding("no_effect", "note", None, "an axis without any")
    for number, one in enumerate(sets):
        found = (everywhere_one, twice) if number < 2 else (everywhere_one,)
        sets[number] = replace(one, found=replace(one.found, findings=found))
    first, second = (found.place for found in sets[:2])
    assert judge(gate(), ARMS, sets).notes == (
        f"all {len(sets)} trace sets: identical_arms: a and b are one",
        f"{first}; {second}: no_effect: an axis without any",
    )


READ_HALF = '\n[[reduction]]\nof = "read_bytes"\nat_least = 0.5\nevidence = ["measured"]\n'
DENSE_READ = row("dense").read_bytes


def test_traffic_of_the_growing_layers_is_not_drowned_by_the_windows() -> None:
    """A selector that reads a quarter where it may act, in a model that reads two thirds of its bytes in windows."""
    there = {label: {"read_bytes_growing": DENSE_READ / 3} for label in ARMS}
    there[CAND] = {"read_bytes": 0.75 * DENSE_READ, "read_bytes_growing": DENSE_READ / 12}
    sets = everywhere(blocks={CAND: 0.0}, changes=there)
    for layers, saved in (("model", 0.25), ("growing", 0.75)):
        wanted = gate('one_of = "reduction"\n' + GATE + READ_HALF + f'layers = "{layers}"\n')
        found = check(part(judge(wanted, ARMS, sets)), "read less")
        assert (found.value, found.passed) == (pytest.approx(saved), saved > 0.5)
        assert found.unit.startswith("fraction of the growing layers'") is (layers == "growing")
    nothing_grows = everywhere(changes={label: {"read_bytes_growing": 0.0} for label in ARMS})
    only = gate(GATE + READ_HALF + 'layers = "growing"\n')
    found = check(part(judge(only, ARMS, nothing_grows)), "read less")
    assert (found.value, found.passed, found.note) == (None, None, "no layer grows with the context")


def test_one_saving_of_several_may_be_enough() -> None:
    both = GATE + READ_HALF
    sets = everywhere(blocks={CAND: 0.0}, changes={CAND: {"read_bytes": 0.25 * DENSE_READ}})
    assert overall(judge(gate(both), ARMS, sets)).outcome == "reject"
    one = judge(gate('one_of = "reduction"\n' + both), ARMS, sets)
    assert overall(one).outcome == "promote"
    assert check(part(one), "read less").value == 0.75
    other = check(part(one), "freed (whole_block or compaction)")
    assert (other.passed, other.decides, other.note) == (False, False, "another saving is enough")


SPEED = '\n[[speed]]\nof = "latency"\nat_least = 1.5\nworkloads = ["copy"]\nevidence = {}\nhardware = {}\n'


def sped(*evidences: str, hardware: str = "any", of: str = "latency") -> str:
    return GATE + SPEED.format(str(list(evidences)).replace("'", '"'), f'["{hardware}"]').replace("latency", of)


def timed(**options: object) -> list[SetEvidence]:
    return [
        evidence(name, **(options if name == "copy" else {}))
        for name in ("needle_multikey", "copy", "tracking", "chain")
    ]  # type: ignore[arg-type]


def test_measured_latency_counts_the_policys_own_work() -> None:
    judged = judge(gate(sped("measured")), ARMS, timed(latency=[latency()]))
    found = check(part(judged), "latency gain")
    assert found.value == pytest.approx(0.010 / 0.005)
    assert (found.low, found.high) == (pytest.approx(0.010 / 0.0052), pytest.approx(0.010 / 0.0049))
    assert (found.evidence, found.hardware, found.passed) == ("measured", "Some CPU, 2 threads", True)
    assert overall(judged).line == "promote"
    slow = judge(gate(sped("measured")), ARMS, timed(latency=[latency(policy_seconds=0.004)]))
    assert overall(slow).line.startswith("reject: tiny, copy 2k: latency gain 1.25, at least 1.5 was asked")


@pytest.mark.parametrize(("error", "said"), [(0.12, "calibration error 12%"), (None, "not calibrated")])
def test_modelled_latency_is_said_in_the_verdict(error: float | None, said: str) -> None:
    sets = timed(cost=[cost(calibration_error=error)])
    verdict = overall(judge(gate(sped("measured", "modelled")), ARMS, sets))
    assert verdict.line == f"promote (modelled latency, {said})"


def test_measured_is_preferred_to_modelled() -> None:
    sets = timed(cost=[cost()], latency=[latency()])
    assert overall(judge(gate(sped("measured", "modelled")), ARMS, sets)).line == "promote"


def test_modelled_numbers_do_not_count_where_only_measured_ones_do() -> None:
    verdict = overall(judge(gate(sped("measured")), ARMS, timed(cost=[cost()])))
    assert verdict.line == "hold: tiny, copy 2k: latency gain: no measured latency"


def test_numbers_of_other_hardware_do_not_count() -> None:
    text = sped("measured", "modelled", hardware="mi300x")
    verdict = overall(judge(gate(text), ARMS, timed(cost=[cost()], latency=[latency()])))
    assert verdict.line == "hold: tiny, copy 2k: latency gain: no measured or modelled latency on mi300x"


def test_a_calibration_error_across_the_threshold_decides_nothing() -> None:
    sets = timed(cost=[cost(calibration_error=0.5)])  # 2.0, between 1.33 and 3.0
    found = check(part(judge(gate(sped("modelled")), ARMS, sets)), "latency gain")
    assert (found.passed, found.low, found.high) == (None, pytest.approx(2 / 1.5), 3.0)
    assert found.note == "not told from the threshold; attention time; calibration error 50%"


def test_goodput_pays_for_longer_outputs_and_wrong_answers() -> None:
    long = {CAND: {"generated_tokens": 8, "task": 0.9}}  # dense: 4 tokens, task 1
    sets = timed(latency=[latency()], changes=long)
    found = check(part(judge(gate(sped("measured", of="goodput")), ARMS, sets)), "goodput gain")
    assert found.value == pytest.approx(2.0 * 0.9 / 2)
    assert found.passed is False


def test_equivalence_refuses_a_gain_too() -> None:
    both = gate(GATE.replace("margin = 0.1", 'margin = 0.1\ntest = "equivalence"'))
    found = part(judge(both, ARMS, everywhere()))
    assert check(found, "quality top1").passed and check(found, "quality top1 not better either").passed
    assert check(found, "quality top1 not better either").threshold == 0.1
    spread = (1.0, 1.0, 1.0, 1.0, 0.9, 1.0, 1.0, 1.0)
    weak = tuple(value - 0.15 for value in spread)
    gained = part(judge(both, ARMS, everywhere(top1={CAND: spread, "dense": weak, "dense'": weak})))
    assert check(gained, "quality top1 not better either").passed is False


def test_a_metric_where_less_is_better_has_its_threshold_above() -> None:
    lower = gate(GATE.replace('"top1"', '"nll"'))
    baselines = {label: {"nll": 2.0} for label in ARMS if label.startswith(("random", "recency", "stream", "paged"))}
    sets = everywhere(changes={CAND: {"nll": 0.9}, **baselines})
    found = check(part(judge(lower, ARMS, sets)), "quality nll")
    assert (found.threshold, found.direction, found.value) == (0.1, "at_most", pytest.approx(0.4))


def test_an_arm_that_is_missing_somewhere_is_held() -> None:
    less = tuple(label for label in ARMS if label != CAND)
    verdict = overall(judge(gate(), ARMS, [*everywhere()[:3], evidence("chain", arms=less)]))
    assert verdict.line == "hold: tiny, chain 2k: did not run"


def test_an_arm_that_has_nothing_to_do_says_why_once() -> None:
    sets = everywhere()
    for number, one in enumerate(sets):
        cells = tuple(cell for cell in one.found.cells if cell.arm != CAND)
        sets[number] = replace(one, found=replace(one.found, cells=cells, not_applicable={CAND: "it is too short"}))
    verdict = overall(judge(gate(), ARMS, sets))
    assert verdict.line == f"hold: all {len(sets)} trace sets: not applicable, it is too short"


def test_exploratory_verdicts_say_so() -> None:
    judged = judge(gate(), ARMS, everywhere(), exploratory=True)
    assert all(verdict.exploratory for verdict in judged.verdicts)
    assert replace(overall(judged), exploratory=False).outcome == "promote"


def test_a_metric_of_a_text_that_was_not_generated_holds_the_arm() -> None:
    note = "not measured: nothing was generated (free_tokens = 0)"
    sets = everywhere(changes=dict.fromkeys(ARMS, SILENT))
    judged = judge(gate(GATE.replace('"top1"', '"task"')), ARMS, sets)
    found = part(judged)
    quality = check(found, "quality task")
    assert (quality.value, quality.low, quality.high, quality.passed, quality.note) == (None, None, None, None, note)
    assert quality.threshold == -0.1
    for name in (f"better than {RANDOM}", "on the front"):
        assert (check(found, name).passed, check(found, name).note) == (None, note)
    assert (found.outcome, overall(judged).outcome) == ("hold", "hold")
    assert found.reason.startswith(f"quality task: {note}")
    assert overall(judge(gate(), ARMS, sets)).line == "promote", "what was measured is judged as ever"


def test_goodput_of_a_text_that_was_not_generated_is_not_decided() -> None:
    sets = timed(latency=[latency()], changes=dict.fromkeys(ARMS, SILENT))
    found = check(part(judge(gate(sped("measured", of="goodput")), ARMS, sets)), "goodput gain")
    assert (found.value, found.passed) == (None, None)
    assert found.note == "not measured: nothing was generated (free_tokens = 0)"


def test_rivals_are_compared_in_a_metric_that_was_measured() -> None:
    both = GATE.replace(
        "[[quality]]", '[[quality]]\nmetric = "task"\nmargin = 0.1\nevidence = ["measured"]\n\n[[quality]]'
    )
    found = part(judge(gate(both), ARMS, everywhere(changes=dict.fromkeys(ARMS, SILENT))))
    assert check(found, "quality task").passed is None and check(found, "quality top1").passed is True
    assert check(found, f"better than {RANDOM}").passed is True
    assert check(found, f"better than {RANDOM}").unit.startswith("top-1")


def test_what_is_rejected_somewhere_is_not_saved_by_being_too_good_elsewhere() -> None:
    too_good = Finding("beats_dense", "suspect", CAND, "nll -0.1 (noise 0.01)")
    sets = [*everywhere(findings=[too_good])[:3], evidence("chain", blocks={CAND: 0.0})]
    verdict = overall(judge(gate(), ARMS, sets))
    assert verdict.outcome == "reject" and verdict.reason.startswith("tiny, chain 2k: freed")
