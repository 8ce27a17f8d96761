"""The text that policies which learn offline are fitted on: one context per model, set apart from every test."""

from __future__ import annotations

from kvassay.experiment.asked import short_model
from kvassay.experiment.schema import CalibrationTable
from kvassay.experiment.tokens import show_tokens
from kvassay.record.load import LoadedModel
from kvassay.workload.registry import build
from kvassay.workload.sample import Sample

SPLIT = "calibration"
"""The part of the prose that test contexts, which are made of the part `test`, have no paragraph of."""


def calibration_sample(loaded: LoadedModel, wanted: CalibrationTable) -> Sample:
    """The calibration text of a model, shortened until it fits the model's native context.

    A workload makes no context without a question, so one is asked and room is left for it.
    Raises `WorkloadError` if the workload cannot be made that short.
    """
    native = loaded.layout.native_context
    length = min(wanted.length, native)
    while True:
        sample = build(wanted.workload, loaded.tokenizer, length, seed=wanted.seed, questions=1, split=SPLIT)
        over = length + len(sample.branches[0].token_ids) - native
        if over <= 0:
            return sample
        length -= over


def calibration_name(model: str, sample: Sample) -> str:
    """What its trace is called, before the key."""
    return f"{short_model(model)}-calibration-{sample.workload}-{show_tokens(len(sample.context_ids))}"
