"""A long generated scratchpad: the chain workload, where a model would write most of the document itself.

Known values and the plan are the prompt. The worked steps and the prose between them are fed token by token, as if
generated (teacher-forced), so that policies which act on generated tokens have something to act on. What the answer
recalls stands in either part: known values in the prompt, results of worked steps in generated text alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvassay.errors import WorkloadError
from kvassay.workload import chain
from kvassay.workload.assemble import Draft, Job


@dataclass(frozen=True)
class ScratchpadParams:
    """The last `generated` tokens of the document follow the context; the others as for `chain`."""

    generated: int = 1024
    worked: int = 8
    steps: int = 4
    far: int = 512


def draft(job: Job, params: ScratchpadParams) -> Draft:
    """The chain's draft of a document of context and generated text together."""
    if params.generated < 1:
        raise WorkloadError(f"{job.workload}: generated={params.generated} must be at least 1")
    whole = replace(job, length=job.length + params.generated)
    made = chain.draft(whole, chain.ChainParams(params.worked, params.steps, params.far))
    # Without a preview: the plan stands in the prompt as it is, and says what will be asked.
    return replace(made, generated=params.generated, preview="")
