"""Reading hardware files: the shipped ones by name, or a user's own by path."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvassay.errors import HardwareError, did_you_mean
from kvassay.layout.model import DTYPE_BYTES

ENDING = ".toml"
Dtype = Literal["float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"]
Texts = Annotated[tuple[str, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Achievable(_Table):
    """`[achievable]`: how much of the peaks decode attention really reaches."""

    bandwidth: Share
    """Fraction of `memory_bandwidth`."""
    matrix: Share
    """Fraction of `matrix_rate`."""
    source: str = Field(min_length=1)
    """Where the fractions come from, or "assumed"."""


class Machine(_Table):
    """`[machine]`: which measured times may calibrate this file."""

    cpu: str = Field(min_length=1)
    """What the processor's name begins with."""
    cores: int = Field(ge=1)


class Hardware(_Table):
    """One machine, by its peaks and by what can be reached of them."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    title: str = Field(min_length=1)
    """In words, for people."""
    kind: Literal["cpu", "gpu"]
    memory_bandwidth: Positive
    """Peak, bytes per second."""
    capacity: Positive
    """Memory, bytes."""
    matrix_rate: dict[Dtype, Positive] = Field(min_length=1)
    """Peak of dense matrix products by element dtype, floating-point operations per second, no sparsity."""
    achievable: Achievable
    sources: Texts = Field(min_length=1)
    """Title and address of what the peaks are from."""
    cache_dtype: Dtype | None = None
    """Dtype in which attention reads unencoded cache elements here; None: the model's own."""
    machine: Machine | None = None
    """The machine itself, if times measured on it can be compared with the model."""

    @property
    def bandwidth(self) -> float:
        """Achievable bytes per second."""
        return self.memory_bandwidth * self.achievable.bandwidth

    def rate(self, kv_dtype: str) -> float:
        """Achievable floating-point operations per second where the cache is `kv_dtype`.

        `HardwareError` if the file has no rate for that dtype.
        """
        dtype = self.cache_dtype or kv_dtype
        for known, peak in self.matrix_rate.items():
            if known == dtype:
                return peak * self.achievable.matrix
        raise HardwareError(f"{self.name}: [matrix_rate] has no '{dtype}'{did_you_mean(dtype, self.matrix_rate)}")

    def is_machine(self, cpu: str, cores: int) -> bool:
        """Whether times measured on a machine with that processor may calibrate this file."""
        return self.machine is not None and cpu.startswith(self.machine.cpu) and cores == self.machine.cores


def shipped() -> tuple[str, ...]:
    """Names of the shipped hardware files."""
    folder = files("kvassay.measure.hardware")
    return tuple(sorted(item.name.removesuffix(ENDING) for item in folder.iterdir() if item.name.endswith(ENDING)))


def load_hardware(name: str) -> Hardware:
    """The hardware of a shipped name, or of a file's path (it ends in `.toml`).

    `HardwareError` names the file and the key that is wrong, and what is allowed.
    """
    if not name.endswith(ENDING):
        if name not in shipped():
            hint = did_you_mean(name, shipped())
            raise HardwareError(f"unknown hardware '{name}'{hint}; a file of your own ends in {ENDING}")
        return _shipped(name)
    file = Path(name).expanduser()
    try:
        return parse_hardware(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise HardwareError(f"{file}: cannot be read: {error.strerror or error}") from None


@cache
def _shipped(name: str) -> Hardware:
    text = files("kvassay.measure.hardware").joinpath(name + ENDING).read_text(encoding="utf-8")
    return parse_hardware(text, name + ENDING)


def parse_hardware(text: str, source: str) -> Hardware:
    """The hardware that TOML `text` describes; `source` begins every error."""
    try:
        return Hardware.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HardwareError(f"{source}: not valid TOML: {error}") from None
    except ValidationError as error:
        raise HardwareError(f"{source}: {_explain(error)}") from None


def _explain(error: ValidationError) -> str:
    """One line for the first fault, an unknown key before the missing one that it may be meant for."""
    first = min(error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden")
    *parents, key = (str(part) for part in first["loc"] if part != "[key]")
    table = f"[{parents[0]}] " if parents else ""
    if first["type"] == "extra_forbidden":
        tables: dict[str, type[BaseModel]] = {"achievable": Achievable, "machine": Machine}
        known = tables[parents[0]] if parents else Hardware
        return f"{table}unknown key '{key}'{did_you_mean(key, known.model_fields)}"
    if first["type"] == "missing":
        return f"{table}missing key '{key}'"
    if first["loc"][-1] == "[key]":
        return f"{table}unknown dtype '{key}'{did_you_mean(key, DTYPE_BYTES)}"
    return f"{table}{key}: {first['msg'].removeprefix('Value error, ')}, got {first['input']!r}"
