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

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from kvassay.errors import ExperimentError, did_you_mean
from kvassay.experiment.tokens import parse_tokens

Tokens = Annotated[int, BeforeValidator(parse_tokens)]


class Table(BaseModel):
    """Base of every table: frozen, strict about types, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def _as_tuple(value: object) -> object:
    """TOML has lists; a frozen table holds tuples."""
    return tuple(value) if isinstance(value, list) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


class About(Table):
    """`[experiment]`: what is run on which models."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the experiment and of its run folder: letters, digits, `.`, `_` and `-`."""
    models: Names = Field(min_length=1)
    """Embedded names, folders or Hugging Face ids."""
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
    contexts: int = Field(default=4, ge=1)
    """How many contexts; intervals are over contexts, so 1 gives none."""
    questions: int = Field(default=3, ge=1)
    """Questions asked of each context, each from the same compressed cache."""
    query_aware: bool = False
    """True puts the questions into the context, so that policies see them while compressing."""
    params: dict[str, int | float | str | bool] = Field(default_factory=dict)
    """Parameters of the workload that differ from its defaults."""


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
    workload: str = "prose"
    """Name in `kvassay workloads`; its prose is of documents that no test context is made of."""


class Experiment(Table):
    """A whole experiment file."""

    experiment: About
    workload: Annotated[tuple[Workload, ...], BeforeValidator(_as_tuple)] = Field(min_length=1)
    arms: Arms
    protection: ProtectionTable = ProtectionTable()
    protocol: ProtocolTable = ProtocolTable()
    record: RecordTable = RecordTable()
    calibration: CalibrationTable = CalibrationTable()

    @field_validator("workload")
    @classmethod
    def _no_twins(cls, value: tuple[Workload, ...]) -> tuple[Workload, ...]:
        twice = [item.name for number, item in enumerate(value) if item in value[:number]]
        if twice:
            raise ValueError(f"'{twice[0]}' is listed twice with the same settings")
        return value


def parse_experiment(data: dict[str, Any], source: str) -> Experiment:
    """Return the experiment in `data`; `ExperimentError` beginning with `source` for the first mistake."""
    try:
        return Experiment.model_validate(data)
    except ValidationError as error:
        raise ExperimentError(f"{source}: {explain(error)}") from None


def load_experiment(path: str | Path) -> Experiment:
    """Read and validate an experiment file; `ExperimentError` names file, key and what is allowed."""
    file = Path(path)
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExperimentError(f"{file}: cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{file}: not valid TOML: {error}") from None
    return parse_experiment(data, str(file))


def explain(error: ValidationError) -> str:
    """One line for the first mistake: where it is, what is wrong, what is allowed, and how many more there are."""
    found = _independent(error.errors(include_url=False))
    first = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    *parents, key = first["loc"]
    table = _table_name(parents)
    if first["type"] == "extra_forbidden":
        return f"{table}unknown key '{key}'{did_you_mean(str(key), _known(parents))}{more}"
    if first["type"] == "missing":
        return f"{table}missing key '{key}'{more}"
    message = first["msg"].removeprefix("Value error, ").replace("\n", " ")
    message = message.replace("tuple", "list").replace("Tuple", "List")
    if first["type"] == "string_pattern_mismatch":
        message = "letters, digits, '.', '_' and '-' only, beginning with a letter or digit"
    got = "" if first["type"] == "value_error" else f", got {first['input']!r}"
    return f"{table}{_key_name(key)}: {message}{got}{more}"


def _independent(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """The errors without those that others entail: a misspelt key leaves one missing, a bad entry a list short."""
    places = [item["loc"] for item in errors]
    misspelt = {item["loc"][:-1] for item in errors if item["type"] == "extra_forbidden"}
    return [
        item
        for item in errors
        if not (item["type"] == "missing" and item["loc"][:-1] in misspelt)
        and not (item["type"] == "too_short" and any(_inside(place, item["loc"]) for place in places))
    ]


def _inside(place: tuple[int | str, ...], table: tuple[int | str, ...]) -> bool:
    return place != table and place[: len(table)] == table


def _key_name(key: str | int) -> str:
    return f"entry {key + 1}" if isinstance(key, int) else key


def _table_name(parents: list[str | int]) -> str:
    """How the file writes the place: `[arms] `, `[[workload]] 2: `."""
    if not parents:
        return ""
    name, *rest = parents
    if name == "workload" and rest:
        inner = "".join(f"{_key_name(part)} " for part in rest[1:])
        return f"[[workload]] {int(rest[0]) + 1}: {inner}"
    return f"[{name}] " + "".join(f"{_key_name(part)} " for part in rest)


def _known(parents: list[str | int]) -> list[str]:
    """Keys of the table at a place."""
    model: type[BaseModel] = Experiment
    kinds: dict[str, type[BaseModel]] = {
        "experiment": About,
        "workload": Workload,
        "arms": Arms,
        "protection": ProtectionTable,
        "protocol": ProtocolTable,
        "record": RecordTable,
        "calibration": CalibrationTable,
    }
    if parents:
        model = kinds.get(str(parents[0]), Experiment)
    return list(model.model_fields)
