"""What a capture's requests were: their tokens, and for every token the captured row that holds its K and V.

Two tokens with the same tokens before them have the same keys and values, which is what a prefix cache rests on. So
rows are found by token prefix: what a request took from the cache are the rows of whoever computed them first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvassay.errors import RecordError
from kvassay.record.vllm.capture import Arrived, Capture, Head, Run, Step

ROOT = -1


class Place(NamedTuple):
    """Where a token's rows are."""

    step: int
    """Number of the step."""
    row: int
    """Row of K, V and slots."""
    q_row: int | None
    """Row of queries and outputs; None if they were not kept."""
    logit_row: int | None
    """Row of logits; None if they were not kept."""


@dataclass
class Request:
    """One request as far as it was captured."""

    arrived: Arrived
    tokens: list[int] = field(default_factory=list)
    """Tokens with a place in the cache: the last one sampled was never fed, so it is not among them."""
    nodes: list[int] = field(default_factory=list)
    """The number of each token's prefix."""
    preempted: bool = False
    """Whether it lost its blocks on the way, so that no log of block tables can tell it."""


class Sequences:
    """The requests of a capture that were seen from their first token on, by name, in order of arrival."""

    def __init__(self, capture: Capture) -> None:
        self.requests: dict[str, Request] = {}
        self._node: dict[tuple[int, int], int] = {}
        self._place: dict[int, Place] = {}
        for step in capture.steps:
            self._add(step, capture.head)

    def places(self, request: Request, first: int, end: int) -> list[Place]:
        """Where the rows of tokens `first` to `end` are; `RecordError` for one that was never captured."""
        found = []
        for position in range(first, end):
            place = self._place.get(request.nodes[position])
            if place is None:
                raise RecordError(
                    f"request {request.arrived.id}: token {position} came from the prefix cache and was computed "
                    "before the capture began; reset the prefix cache first, or begin with the server"
                )
            found.append(place)
        return found

    def complete(self, request: Request) -> bool:
        """Whether every token's rows were captured, and the request kept its blocks."""
        return not request.preempted and all(node in self._place for node in request.nodes)

    def _add(self, step: Step, head: Head) -> None:
        for name in step.preempted:
            if name in self.requests:
                self.requests[name].preempted = True
        for arrived in step.arrived:
            self.requests[arrived.id] = request = Request(arrived)
            self._extend(request, arrived.prompt_ids[: arrived.hit])
        places = _places(step, head)
        for ran in step.ran:
            own = [next(places) for _ in ran.ids]
            known = self.requests.get(ran.id)
            if known is None or known.preempted:
                continue
            if ran.first != len(known.nodes):
                raise RecordError(
                    f"step {step.step}: request {ran.id} goes on at position {ran.first}, not {len(known.nodes)}"
                )
            self._extend(known, ran.ids)
            for node, place in zip(known.nodes[ran.first :], own, strict=True):
                self._place.setdefault(node, place)

    def _extend(self, request: Request, ids: Iterable[int]) -> None:
        for token in ids:
            before = request.nodes[-1] if request.nodes else ROOT
            request.tokens.append(token)
            request.nodes.append(self._node.setdefault((before, token), len(self._node)))


def _places(step: Step, head: Head) -> Iterator[Place]:
    """The places of a step's rows, in batch order."""
    row = q_row = logit_row = 0
    for position in (p for ran in step.ran for p in range(ran.first, ran.first + len(ran.ids))):
        has_q = position >= head.q_from
        has_logits = head.logits_k > 0 and position >= head.logits_from
        yield Place(step.step, row, q_row if has_q else None, logit_row if has_logits else None)
        row, q_row, logit_row = row + 1, q_row + has_q, logit_row + has_logits


def runs(places: Sequence[Place], field_name: str) -> list[Run]:
    """Join neighbours: the rows of `places` by `row`, `q_row` or `logit_row`, as few runs in order."""
    found: list[Run] = []
    for place in places:
        row = getattr(place, field_name)
        if row is None:
            raise RecordError(f"step {place.step}: a row was captured without its {field_name.removesuffix('_row')}")
        last = found[-1] if found else None
        if last is not None and last.step == place.step and last.first + last.length == row:
            found[-1] = last._replace(length=last.length + 1)
        else:
            found.append(Run(place.step, row, 1))
    return found


@dataclass(frozen=True)
class Conversation:
    """What becomes one trace: a context, and requests that go on from it."""

    tokens: int
    """Length of the context."""
    branches: tuple[str, ...]
    """The requests."""
    context: str | None = None
    """A request that was the context and nothing else, if there was one."""


def conversations(sequences: Sequences, share: float = 0.5) -> list[Conversation]:
    """Sort the complete requests into traces: those whose prompts share at least `share` of the shorter one.

    The context is what all prompts of a trace share, but for at least one token each; a request with nothing shared
    has its prompt but the last token. Requests that sampled differently are kept apart, and prompts of one token
    left out. In order of tokens.
    """
    whole = [request for request in sequences.requests.values() if sequences.complete(request)]
    usable = [request for request in whole if 1 < len(request.arrived.prompt_ids) <= len(request.tokens)]
    found: list[list[Request]] = []
    for request in sorted(usable, key=lambda r: (_sampling(r.arrived), r.arrived.prompt_ids)):
        last = found[-1] if found else []
        if last and _sampling(last[0].arrived) == _sampling(request.arrived):
            prompts = [other.arrived.prompt_ids for other in (*last, request)]
            if common(prompts) >= share * min(map(len, prompts)):
                last.append(request)
                continue
        found.append([request])
    return [_conversation(members) for members in found]


def common(prompts: Sequence[Sequence[int]]) -> int:
    """How many first tokens all prompts share, short of the whole of any."""
    shortest = min(map(len, prompts)) - 1
    return next((i for i in range(shortest) if len({prompt[i] for prompt in prompts}) > 1), shortest)


def _conversation(members: Sequence[Request]) -> Conversation:
    names = tuple(member.arrived.id for member in members)
    return Conversation(common([member.arrived.prompt_ids for member in members]), names)


def _sampling(arrived: Arrived) -> tuple[float, float, int]:
    return arrived.temperature, arrived.top_p, -1 if arrived.seed is None else arrived.seed
