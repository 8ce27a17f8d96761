"""The gate file: what an arm must show before it is promoted, written down before anything runs.

[gate]
name = "mine"

[samples]
contexts = 40
questions = 3

[roles]
promote = ["needle_multikey", "copy", "tracking", "chain"]
veto = ["needle_single"]

[[quality]]
metric = "top1"
margin = 0.05
evidence = ["measured"]

[[reduction]]
of = "freed_bytes"
reclaim = ["whole_block"]
at_least = 0.5
evidence = ["measured"]

[[speed]]
of = "latency"
at_least = 1.2
evidence = ["measured", "modelled"]
hardware = ["any"]
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from kvassay.errors import GateError, did_you_mean
from kvassay.experiment.tables import Names, Table, as_tuple, explain, read_toml
from kvassay.gate.roles import KINDS, VETO_ONLY, lacking, workloads_of
from kvassay.measure.check_outcomes import JUDGED
from kvassay.measure.metrics import CARDS, QUALITY
from kvassay.measure.resample import MIN_CLUSTERS
from kvassay.policy.registry import BUILT_IN

ANY = "any"
EXAMPLE = Path(__file__).with_name("gates") / "example.toml"
"""A whole gate with every key explained."""

METRICS = tuple(name for name in QUALITY if CARDS[name].better != "none")
"""Metrics a gate may ask for: those of quality that have a better direction."""

Mode = Literal["whole_block", "per_layer_tables", "per_head_tables", "slot_reuse", "compaction"]
Evidence = Annotated[tuple[Literal["measured", "modelled"], ...], BeforeValidator(as_tuple), Field(min_length=1)]
Measured = Annotated[tuple[Literal["measured"], ...], BeforeValidator(as_tuple), Field(min_length=1)]
Modes = Annotated[tuple[Mode, ...], BeforeValidator(as_tuple)]
Fraction = Annotated[float, BeforeValidator(lambda value: _as_float(value)), Field(gt=0, lt=1)]


def _as_float(value: object) -> object:
    """TOML tells 1 from 1.0; a threshold does not."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


Number = Annotated[float, BeforeValidator(_as_float), Field(allow_inf_nan=False)]


def _known_workloads(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in KINDS:
            raise ValueError(f"unknown workload '{name}'{did_you_mean(name, KINDS)}")
    return names


class About(Table):
    """`[gate]`: the gate's name and how sure it wants to be."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name in the log and in verdicts: letters, digits, `.`, `_` and `-`."""
    alpha: Fraction = 0.05
    """Chance taken, per threshold, of passing an arm that truly lies just beyond it (one-sided)."""
    query_aware: bool = False
    """Whether trace sets whose question was visible while compressing are judged. No engine knows the question."""
    suspect_above: dict[str, Number] = Field(default_factory=dict)
    """By metric: a gain over dense up to this is no reason to suspect a leak; 0 where it is not named.

    Any gain becomes significant with enough contexts, and leaving distracting tokens out has a small one.
    """

    @field_validator("suspect_above")
    @classmethod
    def _gains(cls, value: dict[str, float]) -> dict[str, float]:
        for name, gain in value.items():
            if name not in JUDGED:
                raise ValueError(f"unknown metric '{name}'{did_you_mean(name, JUDGED)}")
            if gain < 0:
                raise ValueError(f"{name}: a gain must be at least 0, not {gain:g}")
            bounds = CARDS[name].paired_bounds
            if bounds is not None and gain >= bounds[1]:
                raise ValueError(f"{name}: {gain:g} suspects nothing: {name} can gain {bounds[1]:g} at most")
        return value


class Samples(Table):
    """`[samples]`: what is planned. A run with fewer contexts may reject, never promote."""

    contexts: int = Field(ge=MIN_CLUSTERS)
    """Contexts per trace set: the independent samples; with fewer than 5 there is no interval."""
    questions: int = Field(default=1, ge=1)
    """Questions per context; as far as they have variance in common, more of them do not help."""
    power: Fraction = 0.8
    """Chance of passing wanted for an arm that truly equals dense; for the detectable difference."""
    spread: dict[str, Number] = Field(default_factory=dict)
    """By metric: standard deviation of one question's difference between arm and dense, as earlier runs had it.

    Without it a right-or-wrong metric is taken to have a tenth of its answers flipped, and of others nothing is said.
    """
    correlation: Annotated[Number, Field(ge=0, le=1)] = 0.5
    """Share of that variance which the questions of one context have in common."""

    @field_validator("spread")
    @classmethod
    def _metrics(cls, value: dict[str, float]) -> dict[str, float]:
        for name, spread in value.items():
            if name not in METRICS:
                raise ValueError(f"unknown metric '{name}'{did_you_mean(name, METRICS)}")
            if spread <= 0:
                raise ValueError(f"{name}: a spread must be more than 0, not {spread:g}")
        return value


class Roles(Table):
    """`[roles]`: which workloads together may speak for an arm, and which only against it."""

    promote: Names = Field(min_length=1)
    """All of them must have run, and be passed: multi-key, copy, tracing and reasoning-shaped work at least."""
    veto: Names = ("needle_single",)
    """Failing one of them is failing; passing proves nothing. They need not have run."""

    @field_validator("promote")
    @classmethod
    def _together(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        _known_workloads(value)
        for name in value:
            if KINDS[name] in VETO_ONLY:
                raise ValueError(f"'{name}' ({KINDS[name]}) may veto, never promote; move it to veto")
        if missing := lacking(value):
            wanted = "; ".join(f"{kind}: {' or '.join(workloads_of(kind))}" for kind in missing)
            raise ValueError(f"these alone may not promote, something is missing ({wanted})")
        return value

    @field_validator("veto")
    @classmethod
    def _veto_known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _known_workloads(value)

    @model_validator(mode="after")
    def _apart(self) -> Roles:
        both = [name for name in self.promote if name in self.veto]
        if both:
            raise ValueError(f"'{both[0]}' is in promote and in veto; choose one")
        return self


class Baselines(Table):
    """`[baselines]`: the arms a candidate must not lose to; a policy that loses to them deserves nothing."""

    arms: Names = ("random", "recency", "streaming", "fp8", "paged-eviction")
    """Policies. One that frees or reads no more than the candidate must answer worse than it."""
    lead: Number = Field(default=0.0, ge=0)
    """By how much, at least, in units of the metric."""

    @field_validator("arms")
    @classmethod
    def _policies(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            plain = name.partition("(")[0]
            if plain not in BUILT_IN and ".py:" not in name:
                raise ValueError(f"unknown policy '{name}'{did_you_mean(plain, BUILT_IN)}")
        return value


class Threshold(Table):
    """What every threshold says beside its number."""

    workloads: Annotated[Names, Field(min_length=1)] = (ANY,)
    """Workloads it holds for; "any": all that the gate judges."""
    hardware: Annotated[Names, Field(min_length=1)] = (ANY,)
    """Names of hardware whose numbers count (`kvassay cost` lists them; a run's own in its `latency.parquet`)."""

    @field_validator("workloads")
    @classmethod
    def _workloads(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return value if value == (ANY,) else _known_workloads(value)

    def about(self, workload: str) -> bool:
        """Whether the threshold holds for a workload."""
        return self.workloads == (ANY,) or workload in self.workloads

    def takes(self, hardware: str) -> bool:
        """Whether numbers of that hardware count."""
        return self.hardware == (ANY,) or hardware in self.hardware


class Quality(Threshold):
    """`[[quality]]`: how much may be lost against dense."""

    metric: str
    """`top1`, `task`, `nll`, `kl` or `agree`."""
    margin: Annotated[Number, Field(gt=0)]
    """The loss that would be too much, in units of the metric."""
    test: Literal["non_inferiority", "equivalence"] = "non_inferiority"
    """Non-inferiority: the loss is less than the margin. Equivalence (TOST): so is the gain."""
    evidence: Measured
    """Quality is always measured."""

    @field_validator("metric")
    @classmethod
    def _metric(cls, value: str) -> str:
        if value not in METRICS:
            raise ValueError(f"unknown metric '{value}'{did_you_mean(value, METRICS)}")
        return value

    @model_validator(mode="after")
    def _can_fail(self) -> Quality:
        bounds = CARDS[self.metric].paired_bounds
        if bounds is not None and self.margin >= bounds[1]:
            raise ValueError(
                f"margin = {self.margin:g} lets everything pass: {self.metric} can lose {bounds[1]:g} at most"
            )
        return self


class Reduction(Threshold):
    """`[[reduction]]`: what must be saved, as a fraction of dense's."""

    of: Literal["freed_bytes", "read_bytes"]
    """Bytes of blocks that really come back to the pool, or bytes read per decoded token."""
    at_least: Fraction
    """Fraction of dense's bytes that is freed, or not read."""
    reclaim: Modes = ()
    """For `freed_bytes`: ways of reclaiming that count, the best of them; report.html explains them."""
    layers: Literal["model", "growing"] = "model"
    """Of the whole model, or of the layers that no window bounds: those of the others a window has saved already."""
    evidence: Measured
    """Bytes are always measured."""

    @model_validator(mode="after")
    def _reclaim(self) -> Reduction:
        if self.of == "freed_bytes" and not self.reclaim:
            raise ValueError('freed_bytes needs reclaim, e.g. reclaim = ["whole_block"]')
        if self.of == "read_bytes" and self.reclaim:
            raise ValueError("read_bytes takes no reclaim: what is not read stays where it is")
        return self


class Speed(Threshold):
    """`[[speed]]`: how much faster decoding must be than dense."""

    of: Literal["latency", "goodput"]
    """Attention and policy time per decoded token; or right answers per second of it, so that longer outputs and
    wrong answers count."""
    at_least: Annotated[Number, Field(gt=0)]
    """Dense's time / the arm's, or the arm's goodput / dense's: 1.2 is a fifth better."""
    evidence: Evidence
    """Kinds that count; measured is preferred where both are there."""
    hardware: Annotated[Names, Field(min_length=1)]
    """Names of hardware whose numbers count, or "any"."""


class Gate(Table):
    """A whole gate file."""

    gate: About
    samples: Samples
    roles: Roles
    baselines: Baselines = Baselines()
    quality: Annotated[tuple[Quality, ...], BeforeValidator(as_tuple)] = Field(min_length=1)
    reduction: Annotated[tuple[Reduction, ...], BeforeValidator(as_tuple)] = Field(min_length=1)
    """Each of them, unless `one_of` says that one is enough."""
    speed: Annotated[tuple[Speed, ...], BeforeValidator(as_tuple)] = ()
    one_of: Literal["reduction", "none"] = "none"
    """"reduction": one reduction passed is enough, since a policy that selects what is read frees nothing."""

    @model_validator(mode="after")
    def _covered(self) -> Gate:
        for workload in (*self.roles.promote, *self.roles.veto):
            if not any(item.about(workload) for item in self.quality):
                raise ValueError(f"no [[quality]] holds for the workload '{workload}', so it would judge nothing")
        for workload in self.roles.promote:
            if not any(item.about(workload) for item in self.reduction):
                raise ValueError(f"no [[reduction]] holds for the workload '{workload}'")
        return self

    @property
    def workloads(self) -> tuple[str, ...]:
        """Workloads that are judged."""
        return (*self.roles.promote, *self.roles.veto)


def parse_gate(data: dict[str, Any], source: str) -> Gate:
    """The gate in `data`; `GateError` beginning with `source` for the first mistake."""
    try:
        return Gate.model_validate(data)
    except ValidationError as error:
        raise GateError(f"{source}: {explain(error, Gate)}") from None


def load_gate(path: str | Path) -> Gate:
    """Read and check a gate file; `GateError` names file, key and what is allowed."""
    return parse_gate(read_toml(path, GateError), str(path))
