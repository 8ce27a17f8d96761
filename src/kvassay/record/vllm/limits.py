"""What of an engine's work is recorded: as options of a call, or as environment variables of a server."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from kvassay.errors import RecordError, did_you_mean

FOLDER_VARIABLE = "KVASSAY_VLLM_RECORD"
"""Environment variable that switches recording on; its value is the capture folder, made by the recorder."""


@dataclass(frozen=True)
class Limits:
    """What is captured; `RecordError` for a value that is not allowed.

    `layers`: indices of the layers, None for all. `kv_heads`: indices of KV heads, each with its query heads, None
    for all. `steps`: the engine steps (first, end) that are captured, counted from 0 over steps that compute
    tokens; end None for no end. `q_from`: position from which queries and outputs are kept. `output`: keep the
    attention output. `logits_k`: of every token computed from position `logits_from` on, the so many largest
    logits; 0 for none.
    """

    layers: tuple[int, ...] | None = None
    kv_heads: tuple[int, ...] | None = None
    steps: tuple[int, int | None] = (0, None)
    q_from: int = 0
    output: bool = False
    logits_k: int = 0
    logits_from: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads"):
            found = getattr(self, name)
            if found is not None and (not found or min(found) < 0 or tuple(sorted(set(found))) != found):
                raise RecordError(f"{name} {found} must be indices from 0 up, each once, in order, at least one")
        first, end = self.steps
        if first < 0 or (end is not None and end <= first):
            raise RecordError(f"steps {first}:{'' if end is None else end} hold no step")
        for name in ("q_from", "logits_from", "logits_k"):
            if getattr(self, name) < 0:
                raise RecordError(f"{name} is {getattr(self, name)}, it must be at least 0")


def from_environment(environment: Mapping[str, str]) -> tuple[str, Limits] | None:
    """Return the capture folder and the limits that a server's variables ask for; None if recording is off.

    `KVASSAY_VLLM_RECORD_<FIELD>` sets the field of `Limits` of that name: indices as `0,5,8-11`, steps as `0:200`,
    `OUTPUT` as 0 or 1, the others as whole numbers. `RecordError` names a variable that is wrong or unknown.
    """
    names = {f"{FOLDER_VARIABLE}_{field.name.upper()}": field.name for field in fields(Limits)}
    given = {key: value for key, value in environment.items() if key.startswith(f"{FOLDER_VARIABLE}_")}
    if FOLDER_VARIABLE not in environment:
        return None
    folder = environment[FOLDER_VARIABLE]
    if not folder:
        raise RecordError(f"{FOLDER_VARIABLE} is empty; it names the folder to record into")
    values: dict[str, object] = {}
    for key, text in given.items():
        if key not in names:
            raise RecordError(f"no variable is called {key}{did_you_mean(key, names)}")
        try:
            values[names[key]] = _READERS[names[key]](text.strip())
        except ValueError:
            raise RecordError(f"{key}='{text}' is not {_FORMS[names[key]]}") from None
    return folder, Limits(**values)  # type: ignore[arg-type]  # each field by its own reader


def parse_indices(text: str) -> tuple[int, ...]:
    """`0,5,8-11` -> (0, 5, 8, 9, 10, 11); ValueError for anything else."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise ValueError(text)
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise ValueError(text)
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def parse_steps(text: str) -> tuple[int, int | None]:
    """`10:200` -> (10, 200), `10:` -> (10, None), `200` -> (0, 200); ValueError for anything else."""
    match = re.fullmatch(r"(?:(\d*):)?(\d*)", text)
    if match is None or not text.strip(":"):
        raise ValueError(text)
    return int(match[1] or 0), int(match[2]) if match[2] else None


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


_READERS: dict[str, Callable[[str], object]] = {
    "layers": parse_indices,
    "kv_heads": parse_indices,
    "steps": parse_steps,
    "q_from": int,
    "output": _flag,
    "logits_k": int,
    "logits_from": int,
}
_FORMS = {
    "layers": "a list of indices such as 0,5,8-11",
    "kv_heads": "a list of indices such as 0,2-3",
    "steps": "a range of steps such as 0:200",
    "q_from": "a position",
    "output": "0 or 1",
    "logits_k": "a whole number",
    "logits_from": "a position",
}
