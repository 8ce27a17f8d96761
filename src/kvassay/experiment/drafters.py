"""What `[speculation]` asks for, checked: who drafts, and which arms take part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvassay.errors import ExperimentError, did_you_mean
from kvassay.experiment.schema import Experiment
from kvassay.measure.acceptance import COMPRESSED, NGRAM
from kvassay.measure.aggregate import DENSE
from kvassay.record.models import CATALOGUE

if TYPE_CHECKING:
    from kvassay.replay.arms import Arm


def draft_models(experiment: Experiment) -> tuple[str, ...]:
    """The drafters that are models, as the file names them."""
    return tuple(name for name in experiment.speculation.drafters if name not in (COMPRESSED, NGRAM))


def speculating_arms(experiment: Experiment, arms: Sequence[Arm]) -> list[Arm]:
    """The arms that `[speculation]` names, or all; dense is always among them."""
    wanted = experiment.speculation.arms
    return [arm for arm in arms if not wanted or arm.label == DENSE or any(name in wanted for name in _names(arm))]


def check_drafters(experiment: Experiment, source: str) -> None:
    """Raise `ExperimentError`, naming `source` and the key, for a name that is no drafter's, or a drafter twice."""
    for name in draft_models(experiment):
        if "/" not in name and name not in CATALOGUE:
            known = did_you_mean(name, [COMPRESSED, NGRAM, *CATALOGUE])
            raise ExperimentError(
                f"{source}: [speculation] drafters: no drafter is called '{name}'{known}; a draft model elsewhere is "
                "named by its folder or Hugging Face id"
            )
    named = [Path(name).name for name in experiment.speculation.drafters]
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice:
        raise ExperimentError(f"{source}: [speculation] drafters: '{twice[0]}' is listed twice")


def check_speculation(experiment: Experiment, arms: Sequence[Arm], source: str) -> None:
    """Raise `ExperimentError`, naming `source` and the key, for an unknown arm."""
    known_arms = [name for arm in arms for name in _names(arm)]
    for name in experiment.speculation.arms:
        if name not in known_arms:
            raise ExperimentError(f"{source}: [speculation] arms: no arm is '{name}'{did_you_mean(name, known_arms)}")


def _names(arm: Arm) -> tuple[str, str, str]:
    """How an arm may be named: its policy, with parameters, with the budget."""
    return arm.policy.card.name, arm.policy.label, arm.label
