"""What is known of recorded heads: a few numbers per head, measured before rotation, in one small file.

A row (key, value or query) is a centre plus scatter. Tokens come in types, the same for all heads of a layer; a type
has a centre per head and side. Scatter is normal: a few directions and what they leave, part of it the same over a few
tokens and part over more (`SPANS`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvassay.errors import RecordError
from kvassay.record.hashing import file_sha256

SPANS = (4, 64)
"""Tokens over which lasting parts of the scatter stay the same; each divides the next."""
SHIPPED = "smollm2-135m"
"""The statistics in the package."""
SCHEMA = "1"


@dataclass(frozen=True)
class Side:
    """Rows of one kind in several heads, before rotation; all float32."""

    centres: Tensor
    """[heads, types, dim]."""
    basis: Tensor
    """[heads, dim, rank]: directions of most scatter, each times its standard deviation."""
    rest: Tensor
    """[heads, dim]: standard deviation of what the directions leave, by channel."""
    lasting: Tensor
    """[heads, spans]: share of the scatter's variance that is the same over each of `SPANS`; together at most 1."""

    @property
    def dim(self) -> int:
        """Channels of a row."""
        return self.rest.shape[-1]


@dataclass(frozen=True)
class LayerStatistics:
    """One recorded layer."""

    frequency: Tensor
    """[types]: share of the tokens that are of each type."""
    keys: Side
    values: Side
    queries: Side
    """Heads are query heads; those of one KV head stand together."""
    first_key: Tensor
    """[kv_heads, k_dim]: the key of position 0, where attention sinks."""
    first_value: Tensor
    """[kv_heads, v_dim]."""
    question: Tensor
    """[q_heads, k_dim]: centre of the queries of the questions after the context, which are not those of its text."""
    aimed: Tensor
    """[q_heads]: share of the queries that put much of their attention on one token far back."""

    @property
    def kv_heads(self) -> int:
        """KV heads recorded."""
        return self.first_key.shape[0]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return len(self.aimed) // self.kv_heads


@dataclass(frozen=True)
class Statistics:
    """Measured layers of one model, by their relative depth in it."""

    layers: Mapping[float, LayerStatistics]
    """By depth: 0 for the model's first layer, 1 for its last."""
    scale: float
    """Factor of the recorded logits."""
    about: Mapping[str, str]
    """Where they are from: model, licence, text, tokens."""
    sha256: str = ""
    """Of the file; empty while there is none."""

    def at(self, depth: float) -> LayerStatistics:
        """The measured layer nearest to a relative depth."""
        return self.layers[min(self.layers, key=lambda known: (abs(known - depth), known))]

    @property
    def name(self) -> str:
        """Model and the beginning of the hash."""
        return f"{self.about.get('model', 'unnamed')} {self.sha256[:12]}".strip()


def save(statistics: Statistics, path: Path) -> None:
    """Write them as float16, which is finer than what a few thousand tokens determine."""
    tensors = {
        f"{depth:.6f}.{name}": tensor.half().contiguous()
        for depth, layer in statistics.layers.items()
        for name, tensor in _flat(layer).items()
    }
    about = {"schema": SCHEMA, "scale": repr(statistics.scale), "about": json.dumps(dict(statistics.about))}
    save_file(tensors, path, metadata=about)


def load(path: Path) -> Statistics:
    """Read what `save` wrote; `RecordError` if it is not that."""
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            found = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except Exception as error:  # the library raises its own kinds
        raise RecordError(f"{path}: cannot be read as statistics: {error}") from None
    if about.get("schema") != SCHEMA:
        raise RecordError(f"{path}: statistics of schema {about.get('schema')}, this kvassay reads {SCHEMA}")
    layers: dict[float, dict[str, Tensor]] = {}
    for name, tensor in found.items():
        depth, _, rest = name.partition(".layer.")
        layers.setdefault(float(depth), {})[rest] = tensor
    return Statistics(
        {depth: _layer(parts) for depth, parts in sorted(layers.items())},
        float(about["scale"]),
        json.loads(about["about"]),
        file_sha256(path),
    )


@cache
def shipped() -> Statistics:
    """The statistics that come with the package."""
    return load(Path(str(files(__package__).joinpath(f"{SHIPPED}.safetensors"))))


def _flat(layer: LayerStatistics) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for field in fields(layer):
        value = getattr(layer, field.name)
        if isinstance(value, Side):
            found |= {f"layer.{field.name}.{part.name}": getattr(value, part.name) for part in fields(value)}
        else:
            found[f"layer.{field.name}"] = value
    return found


def _layer(parts: Mapping[str, Tensor]) -> LayerStatistics:
    def side(name: str) -> Side:
        return Side(**{field.name: parts[f"{name}.{field.name}"] for field in fields(Side)})

    plain = {name: tensor for name, tensor in parts.items() if "." not in name}
    return LayerStatistics(keys=side("keys"), values=side("values"), queries=side("queries"), **plain)
