"""The records of a trace folder (`trace.json`), as typed models with a docstring per field.

A trace is one folder for one context: the `prefix`, stored once, and `branches`, each the tokens that
follow the prefix (a question, then its answer). Tensors lie beside in safetensors shards, stored by token.
"""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Annotated, Any, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)

from kvassay.errors import KvassayError, did_you_mean
from kvassay.layout.model import Layout
from kvassay.layout.serialize import layout_from_dict, layout_to_dict

SCHEMA_VERSION = 1
"""Version of `trace.json` that this kvassay writes and reads."""

HEADER_FILE = "trace.json"
"""Name of the header's file in a trace folder."""
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
PREFIX = "prefix"
"""Name of the segment that holds the shared context."""


def branch_name(index: int) -> str:
    """Segment (and folder) name of branch `index`."""
    return f"branch_{index:03d}"


def _load_layout(value: Any) -> Layout:
    if isinstance(value, Layout):
        return value
    try:
        return layout_from_dict(value)
    except KvassayError as error:
        raise ValueError(str(error)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a layout: {error!r}") from error


StoredLayout = Annotated[Layout, PlainValidator(_load_layout), PlainSerializer(layout_to_dict)]


class Record(BaseModel):
    """Base of every record: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelIdentity(Record):
    """Which model produced the rows."""

    name: str
    """Name under which kvassay knows the model, or its Hugging Face id."""
    weights_sha256: Sha256 | None
    """sha256 of the weight file as loaded; None only for rows no model produced (synthetic traces)."""
    tokenizer_sha256: Sha256 | None
    """sha256 of the tokenizer file; None when the token ids come from no tokenizer."""
    licence: str
    """Licence of the weights, which a recorded trace may inherit ("apache-2.0", "gemma")."""


class Recipe(Record):
    """How the text was made: with the model, all that is needed to record the trace again."""

    name: str
    """Workload name."""
    seed: int
    """Workload seed."""
    index: int
    """Which sample of the workload."""
    length: int
    """Context length asked for, in tokens; the true length is `prefix.tokens`."""
    params: dict[str, JsonValue] = Field(default_factory=dict)
    """Parameters of the workload that differ from its defaults."""
    query_aware: bool = False
    """True when the question stood in the prefix, so that a policy could see it while compressing."""


class Sampling(Record):
    """How the answer tokens of the branches came to be."""

    mode: Literal["teacher_forced", "greedy", "sampled"] = "teacher_forced"
    """`teacher_forced`: given by the workload; `greedy` and `sampled`: produced by the model."""
    temperature: float = 0.0
    """Softmax temperature; 0 unless `sampled`."""
    top_p: float = 1.0
    """Nucleus mass; 1 unless `sampled`."""
    seed: int | None = None
    """Seed of the sampler, if `sampled`."""
    max_new_tokens: int | None = None
    """Bound on generated tokens per branch; None when teacher forced."""


class Versions(Record):
    """Software that recorded the trace."""

    kvassay: str
    """kvassay's version."""
    torch: str
    """torch's version, build suffix included."""
    transformers: str
    """transformers' version."""
    python: str
    """Python's version."""
    vllm: str | None = None
    """vLLM's version when it was the recorder."""

    @classmethod
    def current(cls, **more: str) -> Versions:
        """Versions installed here; `more` adds optional ones (`vllm=...`)."""
        installed = {name: importlib.metadata.version(name) for name in ("kvassay", "torch", "transformers")}
        return cls(**installed, python=platform.python_version(), **more)


TapKind = Literal["hidden", "layer_input", "lse", "output", "bucket", "k_unrotated", "k_prenorm"]


class Tap(Record):
    """Extra evidence recorded for one layer, one row per token, in `<segment>/tap_<name>.safetensors`."""

    kind: TapKind
    """`hidden` [hidden]: residual stream entering the layer; `layer_input` [hidden]: what the q, k, v
    projections read; `lse` [q_heads], always float32: natural-log sum of exponentials of the scaled scores;
    `output` [q_heads, v_dim]: attention output before the output projection; `bucket` [q_heads, size], always
    float32: scaled, soft-capped scores against the keys of the query's own bucket of `size` positions, column c
    of position p being the key at `p - p % size + c`, -inf where the query does not see it; `k_unrotated`,
    `k_prenorm` [kv_heads, k_dim]: keys before RoPE, before the key norm."""
    layer: int = Field(ge=0)
    """Layer index."""
    first: int = Field(default=0, ge=0)
    """First position with a row in the prefix; branches have all rows."""
    size: int | None = Field(default=None, ge=1)
    """Positions per bucket, for `bucket`; buckets are anchored at position 0."""

    @model_validator(mode="after")
    def _size_goes_with_bucket(self) -> Tap:
        if (self.kind == "bucket") != (self.size is not None):
            raise ValueError(f"tap kind '{self.kind}' with size={self.size}: size belongs to 'bucket', and only there")
        return self

    @property
    def name(self) -> str:
        """Name in `Segment.tap(name)` and in the file name, as `lse_007`."""
        return f"{self.kind}_{self.layer:03d}"


class LogitsSpec(Record):
    """What is kept of the branches' logits; row t is the distribution after branch token t."""

    kind: Literal["full", "topk"]
    """`full`: float32 [tokens, vocab]; `topk`: the k largest with their ids, and the row's log-sum-exp."""
    k: int | None = Field(default=None, ge=1)
    """How many, for `topk`."""

    @model_validator(mode="after")
    def _k_goes_with_topk(self) -> LogitsSpec:
        if (self.kind == "topk") != (self.k is not None):
            raise ValueError(f"logits kind '{self.kind}' with k={self.k}: k belongs to 'topk', and only there")
        return self


class Subset(Record):
    """A part of a model's layers and heads: all that a limited recording holds."""

    layers: tuple[int, ...] = Field(min_length=1)
    """The model's index of each layer of `layout`, which numbers its own from 0."""
    kv_heads: tuple[int, ...] | None = None
    """The model's index of each KV head, the same in all layers; None for all. Query heads go with theirs."""


class PrefixEntry(Record):
    """The shared context."""

    tokens: int = Field(ge=1)
    """Its length; positions 0 to tokens-1."""


class BranchEntry(Record):
    """One continuation of the prefix: question tokens, then answer tokens."""

    tokens: int = Field(ge=1)
    """Question and answer together; positions start at `prefix.tokens`."""
    question_tokens: int = Field(ge=0)
    """How many of them are the question."""
    answer_text: str = ""
    """The expected (or generated) answer as text."""
    meta: dict[str, JsonValue] = Field(default_factory=dict)
    """What the scorer of the workload needs besides (depth of the needle, alternatives, keys)."""

    @model_validator(mode="after")
    def _question_fits(self) -> BranchEntry:
        if self.question_tokens > self.tokens:
            raise ValueError(f"question_tokens {self.question_tokens} exceeds the branch's {self.tokens} tokens")
        return self


class ShardEntry(Record):
    """One file of the trace."""

    sha256: Sha256
    """sha256 of the whole file."""
    bytes: int = Field(ge=0)
    """Its size."""


class TraceHeader(Record):
    """`trace.json`: everything about a trace except its tensors, block tables and events."""

    schema_version: Literal[1] = 1
    """Version of this file's schema; another one is refused before anything else is read."""
    layout: StoredLayout
    """The model's cache layout, layer by layer: heads, dims, scale, soft-cap, sinks, `cache_of`."""
    model: ModelIdentity
    """Which model."""
    recipe: Recipe
    """Which text."""
    sampling: Sampling = Sampling()
    """How answers were produced."""
    versions: Versions
    """Which software."""
    dtype: Literal["float32", "float16"]
    """Element type of K, V, Q and taps. float16 makes the trace its own reference: baselines are computed
    from the stored rows. bfloat16 is refused: attention outputs would be off by up to 6 %."""
    prefill_chunk: int = Field(ge=1)
    """Tokens per prefill forward."""
    attention: Literal["eager", "vllm"] = "eager"
    """Attention function that ran: of the model's file in transformers, or vLLM's own."""
    subset: Subset | None = None
    """Which part of the model `layout` describes; None for all of it."""
    q_from: int = Field(default=0, ge=0)
    """First position whose queries are stored; `prefix.tokens` stores none of the prefix."""
    sinks: dict[int, tuple[float, ...]] = Field(default_factory=dict)
    """Logit of each query head's attention sink, by layer: every layer that the layout says has sinks, no other.
    A sink takes part in the softmax and has no value."""
    taps: tuple[Tap, ...] = ()
    """Extra evidence recorded."""
    logits: LogitsSpec | None = None
    """Logits recorded for the branches; None for none."""
    created: AwareDatetime
    """When the recording began, with its time zone."""
    prefix: PrefixEntry
    """The shared context."""
    branches: tuple[BranchEntry, ...] = ()
    """Its continuations, in the order of the folders `branch_000`, `branch_001`, ..."""
    shards: dict[str, ShardEntry] = Field(default_factory=dict)
    """Every tensor file by its path relative to the folder; filled in by the writer."""

    @field_validator("dtype", mode="before")
    @classmethod
    def _never_bfloat16(cls, value: Any) -> Any:
        if value == "bfloat16":
            raise ValueError("bfloat16 traces are refused (attention off by up to 6 %); allowed: float32, float16")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> TraceHeader:
        if self.q_from > self.prefix.tokens:
            raise ValueError(f"q_from {self.q_from} lies beyond the prefix of {self.prefix.tokens} tokens")
        if self.subset is not None and len(self.subset.layers) != len(self.layout.layers):
            raise ValueError(f"subset names {len(self.subset.layers)} layers, the layout has {len(self.layout.layers)}")
        names = [tap.name for tap in self.taps]
        if len(set(names)) != len(names):
            raise ValueError(f"a tap is listed twice: {', '.join(sorted(names))}")
        for tap in self.taps:
            if tap.layer >= len(self.layout.layers):
                raise ValueError(f"tap {tap.name}: the layout has {len(self.layout.layers)} layers")
            if tap.first > self.prefix.tokens:
                raise ValueError(f"tap {tap.name}: first {tap.first} lies beyond {self.prefix.tokens} tokens")
        heads = {layer.index: layer.q_heads for layer in self.layout.layers if layer.sinks}
        for index, logits in self.sinks.items():
            if heads.get(index) != len(logits):
                raise ValueError(f"sinks of layer {index}: {len(logits)} logits, the layout asks {heads.get(index, 0)}")
        return self

    @property
    def missing_sinks(self) -> tuple[int, ...]:
        """Layers whose sinks have no logits yet: none, in a finished trace."""
        return tuple(layer.index for layer in self.layout.layers if layer.sinks and layer.index not in self.sinks)

    @property
    def segment_names(self) -> tuple[str, ...]:
        """Segments in order: `prefix`, `branch_000`, ..."""
        return (PREFIX, *(branch_name(i) for i in range(len(self.branches))))

    def segment_tokens(self, name: str) -> int:
        """Tokens of a segment; KeyError if there is none of that name."""
        if name == PREFIX:
            return self.prefix.tokens
        lengths = {branch_name(i): branch.tokens for i, branch in enumerate(self.branches)}
        return lengths[name]


def _field_names(model: type[Record]) -> set[str]:
    return set(model.model_fields).union(*(kind.model_fields for kind in Record.__subclasses__()))


def explain(error: ValidationError, model: type[Record] = TraceHeader) -> str:
    """One line for the first fault of a validation error: where it is, what is wrong, what is allowed."""
    # An unknown key first: a missing one beside it is usually the same key, misspelt.
    first = min(error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden")
    place = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        key = str(first["loc"][-1])
        return f"unknown key '{place}'{did_you_mean(key, _field_names(model))}{more}"
    message = first["msg"].removeprefix("Value error, ")
    return (f"{place}: {message}{more}" if place else f"{message}{more}").replace("\n", " ")
