"""An experiment from a few options, as `kvassay try` makes it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from kvassay.experiment.asked import short_model
from kvassay.experiment.schema import Experiment, parse_experiment
from kvassay.experiment.toml import resolved_toml

NAME_LENGTH = 60


def quick_experiment(
    model: str,
    policies: Sequence[str],
    budgets: Sequence[str],
    *,
    workloads: Sequence[str],
    length: int,
    contexts: int,
    questions: int,
    query_aware: bool = False,
    own_prefill: bool = False,
    timing: bool = True,
    seed: int = 0,
    device: str = "cpu",
) -> Experiment:
    """The experiment with every other setting at its default; its name says and hashes what is asked for,

    so that the same options continue the same run folder. `own_prefill` runs the policies with a prefill of their
    own too; without `timing` no clock is run. Raises `ExperimentError` as for a file.
    """
    data = {
        "experiment": {"name": "try", "models": [model], "seed": seed, "device": device},
        "workload": [
            {
                "name": name,
                "length": length,
                "contexts": contexts,
                "questions": questions,
                "query_aware": query_aware,
            }
            for name in workloads
        ],
        "arms": {
            "policies": list(policies),
            "budgets": list(budgets),
            "own_prefill": list(policies) if own_prefill else [],
        },
        "latency": {"enabled": timing},
    }
    made = parse_experiment(data, "kvassay try")
    digest = hashlib.sha256(resolved_toml(made).encode()).hexdigest()[:8]
    words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{short_model(model)}-{'-'.join(policies)}").strip("-")
    name = f"try-{words[:NAME_LENGTH]}-{digest}"
    return made.model_copy(update={"experiment": made.experiment.model_copy(update={"name": name})})
