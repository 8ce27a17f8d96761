"""What an experiment asks for by name and number, checked without a model library.

A slip in the file is told in a fraction of a second: nothing here imports torch or transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvassay.errors import ExperimentError, ModelError, did_you_mean
from kvassay.experiment.drafters import check_drafters, draft_models
from kvassay.experiment.schema import Experiment
from kvassay.experiment.tables import at
from kvassay.layout.config import cached, from_config
from kvassay.layout.registry import rows
from kvassay.policy.budget import Budget
from kvassay.policy.registry import check_names
from kvassay.record.load import HUB_ID, describe, locate
from kvassay.record.models import CATALOGUE
from kvassay.record.shards import check_shards
from kvassay.workload.registry import check, check_import, get


def check_asked(experiment: Experiment, source: str, base: Path) -> None:
    """Check names of policies, budgets, workloads, models and draft models, and the lengths of contexts.

    `source` begins every error; `base` is where relative plug-in files lie. Raises `ExperimentError`.
    """
    arms = experiment.arms
    for place, texts in (("policies", arms.policies), ("own_prefill", arms.own_prefill)):
        for text in texts:
            with at(f"{source}: [arms] {place}"):
                check_names(text, base)
    for text in arms.budgets:
        with at(f"{source}: [arms] budgets"):
            Budget.parse(text)
    check_workloads(experiment, source)
    check_drafters(experiment, source)
    models = experiment.experiment.models
    for place, names in (("[experiment] models", models), ("[speculation] drafters", draft_models(experiment))):
        for name in names:
            with at(f"{source}: {place}"):
                check_model(name)
    check_lengths(experiment, source)


def about_workloads(experiment: Experiment, source: str, options: Sequence[str]) -> str:
    """What to say of options that long rows cannot honour; `ExperimentError` where there is no workload that could."""
    given = " and ".join(options)
    if not experiment.workload:
        raise ExperimentError(
            f"{source}: holds [[long]] only, and {given} would do nothing: long rows have no contexts to count and no "
            "verdict, and those that may not judge no quality either"
        )
    return f"{given}: of the workloads only; long rows are run whole and have no verdict"


def check_workloads(experiment: Experiment, source: str) -> None:
    """Refuse an unknown workload, parameters it does not take, and a calibration on text that is not set apart."""
    for number, workload in enumerate(experiment.workload):
        with at(f"{source}: [[workload]] {number + 1}"):
            check(workload.name, workload.params, workload.questions)
    name = experiment.calibration.workload
    with at(f"{source}: [calibration] workload"):
        divided = get(name).draft is not None
    if not divided:
        raise ExperimentError(f"{source}: [calibration] workload: '{name}' is imported, it has no text set apart")


def check_imports(experiment: Experiment, source: str) -> None:
    """Refuse a file to import that cannot be read or lacks rows; apart, as a finished run is read without it."""
    for number, workload in enumerate(experiment.workload):
        with at(f"{source}: [[workload]] {number + 1}"):
            check_import(workload.name, workload.params, workload.contexts)


def check_model(name: str) -> None:
    """Refuse a name under which no model can be loaded: `ModelError` that suggests only names that can be.

    Whether a Hugging Face id exists is left to `check_loadable`, which asks the hub.
    """
    if name in CATALOGUE or Path(name).expanduser().is_dir():
        return
    if row := rows.find(name):
        raise ModelError(
            f"'{name}' is a layout in the registry, without weights; to run it, name the folder or the Hugging Face id "
            f"of its weights ({row.repo})"
        )
    if not HUB_ID.fullmatch(name) or ("/" not in name and cached(name) is None):
        raise ModelError(
            f"'{name}' is no folder, no Hugging Face id (owner/name) and no embedded model"
            f"{did_you_mean(name, CATALOGUE)}"
        )


def check_loadable(name: str) -> None:
    """Refuse a model whose configuration, tokenizer or weight files cannot be had: what `load` would raise, without
    reading weights. A Hugging Face id is asked of the hub. It imports transformers, unlike the rest here.
    """
    source, place = locate(name)
    if source == "embedded":
        return
    describe(name)
    if source == "folder":
        check_shards(Path(place))
        if not [*Path(place).glob("*.safetensors"), *Path(place).glob("pytorch_model*.bin")]:
            raise ModelError(f"{place}: no weights: neither *.safetensors nor pytorch_model*.bin")


def check_lengths(experiment: Experiment, source: str) -> None:
    """Refuse contexts beyond a model's native length, and models whose cache is not supported.

    A Hugging Face id that is not in the local cache yet is left to the recorder, which checks again.
    """
    for model in experiment.experiment.models:
        if not Path(model).expanduser().is_dir() and "/" in model and cached(model) is None:
            continue
        with at(f"{source}: [experiment] models"):
            native = from_config(model).native_context
        for number, workload in enumerate(experiment.workload):
            if workload.length >= native and not experiment.protocol.allow_beyond_native:
                raise ExperimentError(
                    f"{source}: [[workload]] {number + 1}: length {workload.length} leaves no room for a question in "
                    f"the native context of {model}, {native} tokens; shorten it, or set allow_beyond_native in "
                    "[protocol] of an experiment file"
                )


def short_model(name: str) -> str:
    """A model's name without the folders before it."""
    return Path(name).expanduser().name if "/" in name else name
