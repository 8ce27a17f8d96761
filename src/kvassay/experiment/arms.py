"""The arms of an experiment: the always-on ones, every candidate at every budget, then own prefills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvassay.errors import ExperimentError
from kvassay.experiment.arminfo import ArmInfo
from kvassay.experiment.schema import Experiment
from kvassay.experiment.tables import at
from kvassay.measure.aggregate import DENSE
from kvassay.policy.base import Policy
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.card import Effect, Prefill
from kvassay.policy.compose import Composed
from kvassay.policy.registry import parse
from kvassay.policy.twins import merge_off
from kvassay.replay.arms import Arm, always_on, grid


def build_arms(experiment: Experiment, source: str, base: Path) -> list[Arm]:
    """Every arm of the experiment, always-on arms first and those with a prefill of their own last.

    A candidate that is an always-on arm too appears once; one that merges has its merge-off twin after it.
    Plug-in files are looked up from `base`.
    Raises `ExperimentError`, naming `source` and the key, for an unknown policy, parameter or budget.
    """
    wanted, place = experiment.arms, f"{source}: [arms]"
    with at(f"{place} budgets"):
        budgets = [Budget.parse(text) for text in wanted.budgets]
    with at(f"{place} policies"):
        policies = _with_twins([parse(text, base) for text in wanted.policies])
    protection = Protection(experiment.protection.sink, experiment.protection.recent)
    with at(f"{place} budgets"):
        shared = _shared(budgets, protection) if wanted.always_on else []
    taken = {arm.label for arm in shared}
    with at(place):
        own = [arm for one in policies for arm in _candidate(one, budgets, protection) if arm.label not in taken]
    with at(f"{place} own_prefill"):
        prefilled = [_own_prefill(parse(text, base), budgets, protection) for text in wanted.own_prefill]
    arms = [*shared, *own, *prefilled]
    labels = [arm.label for arm in arms]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        kinds = {type(arm.policy) for arm in arms if arm.label == twice[0]}
        why = "listed twice" if len(kinds) == 1 else "the name of two different policies; change it in the card of one"
        raise ExperimentError(f"{source}: [arms] {', '.join(twice)}: {why}")
    if DENSE not in labels:
        raise ExperimentError(
            f"{source}: [arms] always_on is false, so policies must list '{DENSE}': arms are compared with it"
        )
    return arms


def _with_twins(listed: Sequence[Policy]) -> list[Policy]:
    """Each policy, and after one that merges the same without its merges: the pair tells what merging adds."""
    labels, policies = {policy.label for policy in listed}, []
    for policy in listed:
        policies.append(policy)
        if Effect.MERGE in policy.card.effects and "~" not in policy.card.name:
            twin = _without_merges(policy)
            policies += [] if twin.label in labels else [twin]
    return policies


def _without_merges(policy: Policy) -> Policy:
    if not isinstance(policy, Composed):
        return merge_off(policy) if Effect.MERGE in policy.card.effects else policy
    return Composed(tuple(replace(part, policy=_without_merges(part.policy)) for part in policy.parts_with_budgets))


def check_budgets(experiment: Experiment, arms: list[Arm], source: str) -> None:
    """Refuse a budget that leaves nothing beside what is protected, at any length of the experiment."""
    for number, workload in enumerate(experiment.workload):
        for arm in arms:
            place = f"[[workload]] {number + 1} ({workload.name}, {workload.length} tokens)"
            with at(f"{source}: {place}, arm '{arm.label}'"):
                for budget in (arm.budget, *arm.policy.fixed_budgets):
                    Allowance.resolve(budget, workload.length, arm.protection)


def describe_arms(arms: Sequence[Arm], experiment: Experiment) -> list[ArmInfo]:
    """What the report needs to know of each arm."""
    shared: set[str] = set()
    if experiment.arms.always_on:
        budgets = [Budget.parse(text) for text in experiment.arms.budgets]
        shared = {arm.label for arm in _shared(budgets, Protection())}
    return [_describe(arm, arm.label in shared) for arm in arms]


def _describe(arm: Arm, always: bool) -> ArmInfo:
    card = arm.policy.card
    return ArmInfo(
        label=arm.label,
        policy=card.name,
        budget=arm.budget.label if arm.budget is not None else None,
        exact=card.exact,
        approximates=tuple(sorted(str(item) for item in card.approximates)),
        reference=card.reference,
        reconstruction=card.reconstruction,
        always_on=always,
        source=card.source,
        summary=card.summary,
        gaps=card.gaps,
        deviations=card.deviations,
        own_prefill=arm.prefill is Prefill.OWN,
        effects=tuple(sorted(card.effects)),
        when=tuple(sorted(card.when)),
        evidence=tuple(sorted(card.evidence)),
        acts_on=tuple(sorted(card.acts_on)),
        unit=card.unit,
    )


def _shared(budgets: Sequence[Budget], protection: Protection) -> list[Arm]:
    """The always-on arms; a fraction in any unit is for them a fraction of the tokens."""
    tokens = [Budget("keep_tokens", b.amount) if b.amount <= 1 or b.unit == "read_tokens" else b for b in budgets]
    return always_on(list(dict.fromkeys(tokens)), protection)


def _candidate(policy: Policy, budgets: Sequence[Budget], protection: Protection) -> list[Arm]:
    """One policy at every budget in a unit it can honour; an error if there is none."""
    units = policy.card.budgets | ({"keep_tokens"} if "read_tokens" in policy.card.budgets else set())
    return grid([policy], [b for b in budgets if b.unit in units] or budgets, protection)


def _own_prefill(policy: Policy, budgets: Sequence[Budget], protection: Protection) -> Arm:
    """One policy with a prefill of its own, at the first budget that it can honour."""
    return replace(_candidate(policy, budgets, protection)[0], prefill=Prefill.OWN)
