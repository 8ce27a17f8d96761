"""Several policies as one: ``snapkv+int8``, ``quest+kivi(key_bits=4)``, ``snapkv(keep=0.5)+exact_mass``.

Each part sees the cache under its own card and after the edits of the parts before it, decides with its own budget,
keeps its own state and learns its own artefact. What it touches, and the time it takes, is charged as one policy's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from kvassay.cache.edits import KEEP_ALL, Decision, LowRank
from kvassay.errors import PolicyError
from kvassay.layout.model import Layer
from kvassay.policy.acting import may_act
from kvassay.policy.answers import answering, checked_edits, checked_scores, checked_state
from kvassay.policy.base import Artefact, Calibration, Memory, Policy, State
from kvassay.policy.budget import Allowance, Budget
from kvassay.policy.card import STEPS, Card, Prefill, When
from kvassay.policy.composition import Part, check, composed_card, of_role, sized_by_bytes
from kvassay.policy.fitting import tokens_for_bytes
from kvassay.policy.joining import joined, survivors
from kvassay.policy.readset import ReadSet
from kvassay.policy.views import BlockView, CacheView, LayerView, StepView


@dataclass(frozen=True)
class Composed(Policy):
    """Parts that evict, encode and select, one after the other.

    A budget goes to the part that takes its unit and brings none of its own; ``bytes`` is for the whole: the evictor
    then keeps as many tokens as fit into it once they are encoded. Raises as `composition.check`.
    """

    parts_with_budgets: tuple[Part, ...]

    def __post_init__(self) -> None:
        check(self.parts_with_budgets)

    @cached_property
    def card(self) -> Card:  # type: ignore[override]
        """Of all parts together."""
        return composed_card(self.parts_with_budgets)

    @property
    def parts(self) -> tuple[Policy, ...]:
        """In the order in which they act."""
        return tuple(part.policy for part in self.parts_with_budgets)

    @property
    def fixed_budgets(self) -> tuple[Budget, ...]:
        """Of the parts that bring one."""
        return tuple(part.budget for part in self.parts_with_budgets if part.budget is not None)

    @property
    def label(self) -> str:
        """The parts' labels, as `registry.parse` reads them."""
        return "+".join(part.label for part in self.parts_with_budgets)

    @property
    def parameters(self) -> dict[str, Any]:
        """Every part's, with its name and a dot before each."""
        found = {f"{part.card.name}.{key}": value for part in self.parts for key, value in part.parameters.items()}
        own = {f"{part.name}.{part.budget.unit}": part.budget.amount for part in self.parts_with_budgets if part.budget}
        return found | own

    # -- editing ---------------------------------------------------------------------------------------

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """The edits of all parts that are due, each in the cache that those before it leave."""
        if not (self._fits_bytes(budget) and self._evictor.policy.decides_at(cache.moment)):
            return self._decided(cache, memory, [self._allowance(number, budget) for number in range(len(self.parts))])
        rng = memory.generator()
        start = rng.get_state()

        def trial(tokens: int) -> Decision:
            rng.set_state(start)
            kept = Allowance(Budget("keep_tokens", tokens), tokens, budget.context, budget.protection)
            return self._decided(cache, memory, [self._allowance(number, kept) for number in range(len(self.parts))])

        tokens, decision = tokens_for_bytes(trial, cache, budget, self.card.name)
        return replace(decision, facts={**decision.facts, "keep_tokens": float(tokens)})

    def _decided(self, cache: CacheView, memory: Memory, allowances: Sequence[Allowance]) -> Decision:
        decision = KEEP_ALL
        for number, (part, allowance) in enumerate(zip(self.parts, allowances, strict=True)):
            if not part.decides_at(cache.moment) or part.spares(allowance, cache.length):
                continue
            shown, mine = self._shown(cache, part, decision), self._memory(memory, number)
            scores = {i: _score(part, layer, mine) for i, layer in shown.layers.items()} if part.writes_score else {}
            with answering(part, "decide"):
                then = checked_edits(part, part.decide(shown, scores, mine, allowance))
            outside = sorted(set(then.edits) - set(shown.layers))
            if outside:
                raise PolicyError(f"policy '{part.card.name}' edits layer {outside[0]}, which its card does not act on")
            try:
                decision = joined(decision, then, cache)
            except PolicyError as error:
                raise PolicyError(f"policy '{self.label}': {error}") from error
        return decision

    def _shown(self, cache: CacheView, part: Policy, so_far: Decision = KEEP_ALL) -> CacheView:
        """The layers that a part may act on, after the edits so far."""
        layers = {
            index: layer.seen_by(part.card, survivors(layer, so_far.edits.get(index, ())))
            for index, layer in cache.layers.items()
            if may_act(part.card, layer.layer)
        }
        return replace(cache, layers=layers)

    def _allowance(self, number: int, budget: Allowance) -> Allowance:
        """A part's own budget, the arm's, or none."""
        part, own = self.parts_with_budgets[number], budget.budget
        if part.takes_the_arms and own is not None and own.unit in part.policy.card.budgets:
            return budget
        return Allowance.resolve(part.budget, budget.context, budget.protection)

    def _fits_bytes(self, budget: Allowance) -> bool:
        whole = budget.budget is not None and budget.budget.unit == "bytes"
        return whole and sized_by_bytes(self.parts_with_budgets)

    @property
    def _evictor(self) -> Part:
        found = of_role(self.parts_with_budgets, "evict")
        assert found is not None
        return found

    # -- selecting -------------------------------------------------------------------------------------

    def summarize(self, block: BlockView) -> Mapping[str, Tensor]:
        """The selector's side data."""
        number = self.parts.index(self.summarizer)
        return self.summarizer.summarize(replace(block, artefact=_own(block.artefact, self._key(number))))

    def read(
        self, layer: LayerView, query: Tensor, memory: Memory, budget: Allowance, previous: ReadSet | None
    ) -> ReadSet | None:
        """The selector's choice."""
        number = next(number for number, part in enumerate(self.parts) if part.writes_read)
        part = self.parts[number]
        if not may_act(part.card, layer.layer):
            return None
        shown, allowance = layer.seen_by(part.card), self._allowance(number, budget)
        return part.read(shown, query, self._memory(memory, number), allowance, previous)

    @property
    def reads_together(self) -> bool:  # type: ignore[override]
        """Whether the selector does; what the others do while decoding, the replay knows."""
        return all(part.reads_together for part in self.parts if part.writes_read)

    # -- state and artefacts ---------------------------------------------------------------------------

    def observe(self, state: State, step: StepView) -> State:
        """Every part's state, under a key of its own."""
        found = dict(state)
        for number, part in enumerate(self.parts):
            if part.writes_observe:
                key = self._key(number)
                seen = replace(step, cache=self._shown(step.cache, part))
                after = checked_state(part, part.observe(_own(state, key), seen))
                found = {name: kept for name, kept in found.items() if not name.startswith(key)}
                found |= {key + name: kept for name, kept in after.items()}
        return found

    def fit(self, source: Calibration) -> Artefact:
        """What the parts that learn offline have learnt."""
        tensors: dict[str, Tensor] = {}
        for number, part in enumerate(self.parts):
            if When.OFFLINE in part.card.when:
                tensors |= {self._key(number) + name: value for name, value in part.fit(source).tensors.items()}
        return Artefact(tensors, source.sha256)

    def _memory(self, memory: Memory, number: int) -> Memory:
        key, artefact = self._key(number), memory.artefact
        learns = When.OFFLINE in self.parts[number].card.when
        own = replace(artefact, tensors=_own(artefact.tensors, key)) if learns and artefact is not None else None
        return Memory(_own(memory.state, key), own, memory.rng)

    def _key(self, number: int) -> str:
        return f"{number}:{self.parts[number].card.name}/"

    # -- what the parts ask of the replay ----------------------------------------------------------------

    def project(self, layer: Layer, memory: Memory) -> LowRank | None:
        """The projections of the part that has some."""
        for number, part in enumerate(self.parts):
            if part.writes_project and may_act(part.card, layer):
                return part.project(layer, self._memory(memory, number))
        return None

    def taps_in(self, layers: int) -> frozenset[int]:
        """Every part's."""
        return frozenset[int]().union(*(part.taps_in(layers) for part in self.parts))

    def not_applicable(self, context: int, longest: int, budget: Allowance) -> str | None:
        """The first part's reason that has one."""
        for number, part in enumerate(self.parts):
            reason = part.not_applicable(context, longest, self._allowance(number, budget))
            if reason is not None:
                return f"{part.card.name}: {reason}"
        return None

    def refuses(self, prefill: Prefill) -> str | None:
        """A prefill of its own, if that would encode what is to be evicted."""
        both = all(of_role(self.parts_with_budgets, role) is not None for role in ("evict", "encode"))
        if prefill is Prefill.OWN and both:
            return "encodes as it prefills, and then would evict what it has encoded: it runs on a shared prefill only"
        return next(filter(None, (part.refuses(prefill) for part in self.parts)), None)

    def spares(self, budget: Allowance, length: int) -> bool:
        """Never as a whole: `decide` asks each part."""
        return False

    def decides_at(self, *moments: When) -> bool:
        """Whether a part does."""
        return any(part.decides_at(*moments) for part in self.parts)

    def quiet(self, length: int, generated: int) -> int:
        """Until the first part edits the cache again."""
        late = [part for part in self.parts if part.decides_at(*STEPS)]
        return min((part.quiet(length, generated) for part in late), default=0)

    @property
    def unrotates(self) -> bool:
        """Whether a part does."""
        return any(part.unrotates for part in self.parts)

    @property
    def compares_tokens(self) -> bool:  # type: ignore[override]
        """Whether a part does."""
        return any(part.compares_tokens for part in self.parts)

    @property
    def shares_over_layers(self) -> bool:  # type: ignore[override]
        """Whether a part does."""
        return any(part.shares_over_layers for part in self.parts)

    @property
    def interval(self) -> int | None:
        """Of the part that acts every n tokens."""
        every = [part for part in self.parts if part.decides_at(When.EVERY_N)]
        return getattr(every[0], "interval", None) if every else None

    @property
    def queries_needed(self) -> int:
        """The most that a part needs."""
        return max(part.queries_needed for part in self.parts)

    @property
    def read_block(self) -> int:
        """The selector's."""
        return max(part.read_block for part in self.parts)

    @property
    def query_ring(self) -> int:
        """The longest of a part."""
        return max(part.query_ring for part in self.parts)

    @property
    def summarizer(self) -> Policy:
        """The part that describes blocks; itself if none does."""
        return next((part for part in self.parts if part.writes_summarize), self)

    @property
    def writes_score(self) -> bool:
        """Never: a part scores when it is due, in the cache that is left to it."""
        return False

    @property
    def writes_decide(self) -> bool:
        """True if a part edits the cache."""
        return any(part.writes_decide for part in self.parts)

    @property
    def writes_read(self) -> bool:
        """True if a part selects."""
        return any(part.writes_read for part in self.parts)

    @property
    def writes_project(self) -> bool:
        """True if a part changes the model's projections."""
        return any(part.writes_project for part in self.parts)

    @property
    def writes_observe(self) -> bool:
        """True if a part carries state."""
        return any(part.writes_observe for part in self.parts)

    @property
    def writes_summarize(self) -> bool:
        """True if a part keeps side data per full block."""
        return any(part.writes_summarize for part in self.parts)


def _score(part: Policy, layer: LayerView, memory: Memory) -> Tensor:
    with answering(part, "score", layer.index):
        score = part.score(layer, memory)
    return checked_scores(score, layer)


def _own(tensors: Mapping[str, Tensor], key: str) -> dict[str, Tensor]:
    """One part's tensors, by its own names."""
    return {name.removeprefix(key): value for name, value in tensors.items() if name.startswith(key)}
