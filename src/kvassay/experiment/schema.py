"""The experiment file: one TOML table per concern, each key with its meaning, unit and default.

[experiment]
name = "mine"
models = ["smollm2-135m"]

[[workload]]
name = "kv_short"
length = "2k"

[arms]
policies = ["snapkv(window=32)", "my_policy.py:MyPolicy"]
budgets = ["keep=0.25", "keep=0.5"]
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from kvassay.errors import ExperimentError
from kvassay.experiment.tables import Names, Table, as_tuple, explain, read_toml
from kvassay.experiment.tokens import parse_tokens

Tokens = Annotated[int, BeforeValidator(parse_tokens)]


class About(Table):
    """`[experiment]`: what is run on which models."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the experiment and of its run folder: letters, digits, `.`, `_` and `-`."""
    models: Names = ()
    """Embedded names, folders or Hugging Face ids; needed as soon as there is a `[[workload]]`."""
    seed: int = Field(default=0, ge=0)
    """Seed of the workloads, the policies' random numbers and the intervals."""
    device: str = "cpu"
    """Where the models run: `cpu`, `cuda` or `cuda:N`."""


class Workload(Table):
    """`[[workload]]`: one set of contexts with questions; may be given several times."""

    name: str
    """Name in `kvassay workloads`."""
    length: Tokens
    """Tokens of each context, special tokens included: 2048 or "2k"."""
    contexts: int = Field(default=5, ge=1)
    """How many contexts; intervals are over contexts, and fewer than 5 give none."""
    questions: int = Field(default=3, ge=1)
    """Questions asked of each context, each from the same compressed cache."""
    query_aware: bool = False
    """True puts the questions into the context, so that policies see them while compressing."""
    params: dict[str, int | float | str | bool] = Field(default_factory=dict)
    """Parameters of the workload that differ from its defaults."""


class Long(Table):
    """`[[long]]`: synthetic rows of a model's layer shape, replayed open loop, layer by layer; no model is needed."""

    row: str
    """Name in `kvassay inspect`."""
    lengths: Annotated[tuple[Tokens, ...], BeforeValidator(as_tuple)] = Field(min_length=1)
    """Tokens of the contexts: "128k", "256k", "500k", "1m" or whole numbers."""
    layers: int = Field(default=1, ge=1)
    """Layers replayed, evenly spaced among those whose state grows with the context; results say out of how many.
    Sliding layers hold a bounded state that no policy here touches; their bytes stand beside."""
    question: int = Field(default=8, ge=2, le=64)
    """Tokens after the context whose queries are replayed: half ask as recorded questions do, half look for a planted
    token each."""


class Arms(Table):
    """`[arms]`: the candidates and how much each may keep."""

    policies: Names = ()
    """Candidates, with parameters: "snapkv(window=32)", or of a file: "my_policy.py:MyPolicy"."""
    budgets: Names = Field(min_length=1)
    """How much may be kept or read: "keep=0.25" (fraction), "keep=512" (tokens), "read=0.1", "bytes=0.25".

    A policy runs at those in a unit it can honour; policies that select what is read take `keep` as `read`, and
    the always-on arms take any fraction as one of the tokens.
    """
    own_prefill: Names = ()
    """Policies that also run at their first budget with a prefill of their own, which reads what the policy leaves
    of earlier chunks; written as in `policies`. Only those that act while tokens come in (fp8) differ by it."""
    always_on: bool = True
    """Run the arms that every candidate is judged against; without dense nothing is compared."""


class ProtectionTable(Table):
    """`[protection]`: tokens no arm may evict; inside the budget, equal for every arm."""

    sink: int = Field(default=4, ge=0)
    """First tokens."""
    recent: int = Field(default=32, ge=0)
    """Last tokens."""


class ProtocolTable(Table):
    """`[protocol]`: how traces are replayed."""

    free_tokens: int = Field(default=16, ge=0)
    """Most tokens generated free-running per question; 0 generates none and leaves the task score out."""
    block_size: int = Field(default=16, ge=1)
    """Tokens per block of the replayed cache."""
    allow_beyond_native: bool = False
    """Replay contexts longer than the model was made for."""


class RecordTable(Table):
    """`[record]`: how traces are recorded."""

    prefill_chunk: int = Field(default=512, ge=1)
    """Tokens per prefill forward."""
    q_tail: int = Field(default=64, ge=0)
    """Queries kept of the last so many context tokens; a policy with a longer window needs more."""
    dtype: Literal["float32", "float16"] = "float32"
    """Stored element type; float16 makes the trace its own reference."""


class CalibrationTable(Table):
    """`[calibration]`: the text that policies which learn offline are fitted on; recorded only if an arm does."""

    length: Tokens = 2048
    """Tokens of the context, 2048 or "2k"; where the model was made for less, as many as it takes."""
    seed: int = Field(default=0, ge=0)
    """Seed of the text."""
    workload: str = "prose_numbered"
    """Name in `kvassay workloads`; its prose is of documents that no test context is made of."""


class LatencyTable(Table):
    """`[latency]`: how decode attention is timed, once all contexts are replayed and nothing else runs."""

    enabled: bool = True
    """Time it at all; costs seconds."""
    rounds: int = Field(default=7, ge=3)
    """Rounds over all arms, in turn; times are medians over them."""
    contexts: int = Field(default=1, ge=1)
    """Contexts timed of each workload, the first ones; at most as many as there are."""


class SpeculationTable(Table):
    """`[speculation]`: acceptance in speculative decoding; measured only if drafters are named."""

    drafters: Names
    """Who drafts: "compressed" (each arm's cache drafts, dense verifies), "ngram" (prompt lookup drafts, dense and
    each arm verify), or a second model with the same tokenizer (each arm verifies): an embedded name, a folder or a
    Hugging Face id with a `/`."""
    arms: Names = ()
    """Arms that take part: policies, or whole labels as in the table; none named: all. Dense always does."""
    k: int = Field(default=8, ge=1, le=32)
    """Most draft tokens per round; teacher-forced figures are given for 1 to k."""
    tokens: int = Field(default=16, ge=1)
    """Most positions per question to draft from (teacher-forced), and most tokens to emit (free-running)."""
    ngram_min: int = Field(default=2, ge=1)
    """Shortest end of the text that prompt lookup looks for, in tokens."""
    ngram_max: int = Field(default=4, ge=1)
    """Longest."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        fields = type(self).model_fields.items()
        changed = [name for name, field in fields if name != "drafters" and getattr(self, name) != field.default]
        if changed and not self.drafters:
            raise ValueError(f"{changed[0]} is set, but drafters names nobody, so nothing would be measured")
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min is {self.ngram_min}, ngram_max {self.ngram_max}: at most as long")
        return self


class Experiment(Table):
    """A whole experiment file."""

    experiment: About
    workload: Annotated[tuple[Workload, ...], BeforeValidator(as_tuple)] = ()
    long: Annotated[tuple[Long, ...], BeforeValidator(as_tuple)] = ()
    arms: Arms
    protection: ProtectionTable = ProtectionTable()
    protocol: ProtocolTable = ProtocolTable()
    record: RecordTable = RecordTable()
    calibration: CalibrationTable = CalibrationTable()
    latency: LatencyTable = LatencyTable()
    speculation: SpeculationTable = SpeculationTable(drafters=())

    @field_validator("workload")
    @classmethod
    def _no_twins(cls, value: tuple[Workload, ...]) -> tuple[Workload, ...]:
        twice = [item.name for number, item in enumerate(value) if item in value[:number]]
        if twice:
            raise ValueError(f"'{twice[0]}' is listed twice with the same settings")
        return value

    def first(self, contexts: int) -> Experiment:
        """The same experiment on at most the first so many contexts of each workload."""
        fewer = [item.model_copy(update={"contexts": min(item.contexts, contexts)}) for item in self.workload]
        return self.model_copy(update={"workload": tuple(fewer)})

    @model_validator(mode="after")
    def _something_to_run(self) -> Self:
        if not self.workload and not self.long:
            raise ValueError("nothing to run: neither a [[workload]] nor a [[long]]")
        if self.workload and not self.experiment.models:
            raise ValueError("there is a [[workload]], so [experiment] must list models")
        return self


def parse_experiment(data: dict[str, Any], source: str) -> Experiment:
    """Return the experiment in `data`; `ExperimentError` beginning with `source` for the first mistake."""
    try:
        return Experiment.model_validate(data)
    except ValidationError as error:
        raise ExperimentError(f"{source}: {explain(error, Experiment)}") from None


def load_experiment(path: str | Path) -> Experiment:
    """Read and validate an experiment file; `ExperimentError` names file, key and what is allowed."""
    data = read_toml(path, ExperimentError)
    return parse_experiment(data, str(path))
