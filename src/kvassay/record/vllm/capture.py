"""The capture folder: what an engine did, one line and one tensor file per step, written as it happens.

`capture.json` says what is captured; `steps.jsonl` holds a line per step, written after its tensors, so that a
killed engine leaves a folder that can be read up to its last whole step; `step_000007.safetensors` holds the rows
of step 7 in batch order: `<layer>.k`, `.v` [rows, kv_heads, dim] and `.q`, `.output` [rows from `q_from` on,
q_heads, dim] by true layer index, `slots.<group>` [rows], and `logits.values`, `.ids` [rows from `logits_from`
on, k], `logits.logsumexp`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvassay.errors import RecordError
from kvassay.trace.files import os_errors
from kvassay.trace.schema import Record, explain

HEAD_FILE, STEPS_FILE = "capture.json", "steps.jsonl"
Tables = tuple[tuple[int, ...], ...]
"""Block ids of one request, per KV cache group; 0 is the null block."""


class Run(NamedTuple):
    """Rows one after the other in one step's tensor."""

    step: int
    first: int
    length: int


class CapturedGroup(Record):
    """One of the engine's KV cache groups."""

    layers: tuple[int, ...] = Field(min_length=1)
    """True indices of its layers, captured or not."""
    block_size: int = Field(ge=1)
    """Tokens per block."""
    window: int | None = None
    """Visible tokens, the query's own included, if the group is windowed."""


class Head(Record):
    """`capture.json`."""

    format_version: Literal[1] = 1
    """Version of the folder's format."""
    model: str
    """The model as the engine was given it: a folder or a Hugging Face id."""
    vllm: str
    """vLLM's version."""
    dtype: Literal["float32", "float16"]
    """Element type of the engine's rows."""
    num_blocks: int = Field(ge=1)
    """Blocks of the engine's pool, the null block included."""
    prefill_chunk: int = Field(ge=1)
    """Tokens per step at most."""
    groups: tuple[CapturedGroup, ...] = Field(min_length=1)
    """KV cache groups in the engine's order."""
    layers: tuple[int, ...] = Field(min_length=1)
    """True indices of the captured layers."""
    kv_heads: tuple[int, ...] | None = None
    """Captured KV heads; None for all."""
    sinks: dict[int, tuple[float, ...]] = Field(default_factory=dict)
    """Sink logits of the captured query heads, by layer."""
    q_from: int = Field(ge=0)
    """Position from which queries and outputs are kept."""
    output: bool
    """Whether attention outputs are kept."""
    logits_k: int = Field(ge=0)
    """How many logits per token; 0 for none."""
    logits_from: int = Field(ge=0)
    """Position from which logits are kept."""


class Arrived(Record):
    """A request that was scheduled for the first time."""

    id: str
    """The engine's name for it."""
    prompt_ids: tuple[int, ...]
    """Its prompt."""
    hit: int = Field(ge=0)
    """Prompt tokens found in the prefix cache: not computed, so not among its rows."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass."""
    seed: int | None = None
    """Sampling seed."""
    max_tokens: int | None = None
    """Bound on its output."""


class Ran(Record):
    """Consecutive tokens of one request that a step computed."""

    id: str
    """Which request."""
    first: int = Field(ge=0)
    """Position of the first."""
    ids: tuple[int, ...]
    """The token ids fed to the model."""


class Step(Record):
    """One line of `steps.jsonl`."""

    step: int = Field(ge=0)
    """Number of the step, over steps that compute tokens."""
    finished: tuple[str, ...] = ()
    """Requests that ended and gave their blocks back since the step before."""
    preempted: tuple[str, ...] = ()
    """Requests that lost their blocks and will compute their tokens again."""
    arrived: tuple[Arrived, ...] = ()
    """Requests scheduled for the first time, in the scheduler's order."""
    tables: dict[str, Tables]
    """Block tables of every scheduled request, in the scheduler's order."""
    ran: tuple[Ran, ...]
    """What was computed, in batch order: the order of rows in the step's tensors."""
    seconds: float = 0.0
    """Wall time of the step, recording included."""
    recording_seconds: float = 0.0
    """Of these, spent in the recorder."""


@dataclass(frozen=True)
class Cost:
    """What a capture cost; the engine's start and its warm-up are not in it."""

    steps: int
    """Engine steps captured."""
    seconds: float
    """Wall time of these steps, recording included."""
    recording_seconds: float
    """Of these, spent in the recorder."""
    nbytes: int
    """Bytes of tensors captured."""

    @property
    def overhead(self) -> float:
        """Recording time / the engine's own time."""
        return self.recording_seconds / max(self.seconds - self.recording_seconds, 1e-9)

    def __str__(self) -> str:
        return (
            f"{self.steps} steps in {self.seconds:.2f} s, of which recording {self.recording_seconds:.2f} s "
            f"({self.overhead:.0%} on top); captured {self.nbytes / 2**20:.1f} MiB"
        )


class CaptureWriter:
    """Fills a new folder; a step is in it once `add` returns. `RecordError` if a capture is there already."""

    def __init__(self, folder: str | Path, head: Head) -> None:
        self.folder = Path(folder)
        self.head = head
        with os_errors(self.folder, "create"):
            if (self.folder / HEAD_FILE).exists():
                raise RecordError(f"{self.folder}: holds a capture already; name another folder")
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / HEAD_FILE).write_text(head.model_dump_json(indent=1) + "\n", encoding="utf-8")

    def tensors(self, step: int, rows: dict[str, Tensor]) -> None:
        """Write a step's rows, before its line."""
        path = _step_file(self.folder, step)
        with os_errors(path, "write"):
            save_file({name: tensor.contiguous() for name, tensor in rows.items()}, path)

    def line(self, step: Step) -> None:
        """Append a step's line: from here on it counts."""
        path = self.folder / STEPS_FILE
        with os_errors(path, "write"), path.open("a", encoding="utf-8") as file:
            file.write(step.model_dump_json(exclude_defaults=True) + "\n")


class Capture:
    """A capture folder opened for reading; `RecordError` if it is not one."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.head = self._head()
        self.steps = self._steps()

    def rows(self, run: Run, name: str) -> Tensor:
        """The rows of `run` of a step's tensor."""
        path = _step_file(self.folder, run.step)
        try:
            with safe_open(path, framework="pt") as file:
                found: Tensor = file.get_slice(name)[run.first : run.first + run.length]
        except (OSError, SafetensorError) as error:
            raise RecordError(f"{path}: '{name}' cannot be read: {error}") from error
        return found

    def cost(self) -> Cost:
        """What the recording cost the engine, measured as it ran."""
        return Cost(
            steps=len(self.steps),
            seconds=sum(step.seconds for step in self.steps),
            recording_seconds=sum(step.recording_seconds for step in self.steps),
            nbytes=sum(path.stat().st_size for path in self.folder.glob("step_*.safetensors")),
        )

    def _head(self) -> Head:
        path = self.folder / HEAD_FILE
        if not path.is_file():
            raise RecordError(f"{self.folder}: no {HEAD_FILE} in it: not a capture, or the engine never started")
        try:
            return Head.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise RecordError(f"{path}: {explain(error, Head)}") from error

    def _steps(self) -> tuple[Step, ...]:
        path = self.folder / STEPS_FILE
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]  # the last one was cut off
        found = []
        for number, line in enumerate(lines, start=1):
            try:
                found.append(Step.model_validate_json(line))
            except ValidationError as error:
                raise RecordError(f"{path}: line {number}: {explain(error, Step)}") from error
        return tuple(found)


def _step_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.safetensors"


def top_logits(logits: Tensor, k: int) -> dict[str, Tensor]:
    """The `k` largest of float rows [n, vocab] as a step's tensors."""
    rows = logits.float()
    top = rows.topk(min(k, rows.shape[-1]), dim=-1)
    return {
        "logits.values": top.values.cpu(),
        "logits.ids": top.indices.to("cpu", torch.int32),
        "logits.logsumexp": rows.logsumexp(dim=-1).cpu(),
    }
