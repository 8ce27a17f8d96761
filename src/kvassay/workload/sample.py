"""What a workload hands over: one context, and the branches that are asked after it.

A `Sample` holds token ids only as plain integers, so that it can be stored, hashed and compared anywhere.
The context is compressed once; each branch (question, then answer) starts from that same context.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvassay.errors import WorkloadError

SCHEMA = 1


@dataclass(frozen=True)
class Branch:
    """One question and its exact answer, both as the continuation of the context.

    `scored` lists the indices into `answer_ids` that count (white space and connecting words do not).
    `depth` is the place of the evidence in the context, 0 = first token, 1 = last.
    """

    question_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    question_text: str
    answer_text: str
    scored: tuple[int, ...]
    depth: float
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what no replay could score."""
        if not self.question_ids:
            raise WorkloadError("a branch needs at least 1 question token: its last one predicts the answer")
        if not self.answer_ids:
            raise WorkloadError(f"the branch {self.question_text!r} has no answer tokens")
        if not self.scored:
            raise WorkloadError(f"the branch {self.question_text!r} has no scored answer tokens")
        bad = [i for i in self.scored if not 0 <= i < len(self.answer_ids)]
        if bad:
            raise WorkloadError(
                f"scored index {bad[0]} is outside the {len(self.answer_ids)} answer tokens of {self.question_text!r}"
            )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Question then answer: the tokens that follow the context."""
        return self.question_ids + self.answer_ids


@dataclass(frozen=True)
class Sample:
    """One context of exactly `len(context_ids)` tokens and its branches, reproducible from `meta`.

    `query_aware` says whether the questions were visible inside the context, that is, to compression.
    """

    workload: str
    seed: int
    index: int
    context_ids: tuple[int, ...]
    branches: tuple[Branch, ...]
    query_aware: bool
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse an empty sample."""
        if not self.context_ids:
            raise WorkloadError(f"{self.workload}: the context is empty")
        if not self.branches:
            raise WorkloadError(f"{self.workload}: a sample needs at least 1 branch")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"schema": SCHEMA, **asdict(self)}

    def to_json(self) -> str:
        """Return one line of JSON; `Sample.from_json` gives the equal sample back."""
        return json.dumps(self.to_dict(), sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """Rebuild a sample from `to_dict` (after JSON, too). Raises `WorkloadError` on another schema."""
        schema = data.get("schema")
        if schema != SCHEMA:
            raise WorkloadError(f"sample schema {schema!r} is not {SCHEMA}")
        try:
            branches = tuple(_branch(item) for item in data["branches"])
            return cls(
                workload=data["workload"],
                seed=data["seed"],
                index=data["index"],
                context_ids=tuple(data["context_ids"]),
                branches=branches,
                query_aware=data["query_aware"],
                meta=data["meta"],
            )
        except (KeyError, TypeError) as error:
            raise WorkloadError(f"sample record is incomplete: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> Sample:
        """Rebuild a sample from one line of `to_json`."""
        return cls.from_dict(json.loads(text))


def _branch(item: Mapping[str, Any]) -> Branch:
    """Rebuild one branch; JSON turns tuples into lists, so turn them back."""
    fields = dict(item)
    for name in ("question_ids", "answer_ids", "scored"):
        fields[name] = tuple(fields[name])
    return Branch(**fields)
