"""The policy contract: a frozen dataclass of parameters that is given views and answers with data.

A policy writes one or two of these methods; the base supplies the rest. A scorer alone is a complete
eviction policy: `decide` keeps the protected tokens and the best of the others, per KV head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from inspect import isfunction, signature
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from kvassay.cache.edits import Decision, Evict, LowRank
from kvassay.errors import BudgetError, PolicyError
from kvassay.layout.model import Layer
from kvassay.policy.budget import Allowance, Budget
from kvassay.policy.card import STEPS, Card, Evidence, Prefill, When
from kvassay.policy.readset import ReadSet
from kvassay.policy.views import BlockView, CacheView, LayerView, StepView
from kvassay.policy.weights import CalibrationPass, LayerWeights, Occlusions, Projection

State = Mapping[str, Tensor]
"""What a policy carries from step to step. Functional: return a new mapping, never write into a tensor.
That makes `fork` and `rollback` free; its bytes are counted."""

EMPTY: State = {}

ALL_APART = frozenset({"score", "decide", "read"})
"""`Policy.per_head` of a policy to which KV heads are nothing but so many cases."""

EVERY_QUERY = 1 << 40
"""More prompt queries than any context has: `Policy.queries_needed` of a method that needs them all."""


@dataclass(frozen=True)
class Artefact:
    """What `fit` learned offline: tensors only, with the sha256 of the text it was fitted on."""

    tensors: Mapping[str, Tensor]
    source_sha256: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class Calibration(Protocol):
    """What offline methods may learn from: recorded layers of calibration text, never the test's; and the model's own
    weights, for a card that asks for `Evidence.WEIGHTS`."""

    sha256: str

    def layers(self) -> Iterable[tuple[int, LayerView]]:
        """Each layer's view over the calibration tokens."""

    def weights(self) -> Mapping[int, LayerWeights]:
        """Key and value projections of the layers in the policy's scope; `Evidence.WEIGHTS`."""

    def outputs(self) -> Mapping[int, Projection]:
        """Output projections of the layers in the policy's scope; `Evidence.WEIGHTS`."""

    def passes(self, samples: int, tokens: int) -> Iterable[CalibrationPass]:
        """The model run over up to `samples` pieces of `tokens` tokens each, as many as the text has (one, if it is
        shorter than a piece); `Evidence.WEIGHTS`, and gradients with `Evidence.GRADIENTS`."""

    def occlusions(self, tokens: int, width: int, stride: int) -> Occlusions:
        """What every `stride`-th piece of `width` tokens is to the answer of the text's first question, in its last
        `tokens` tokens; `Evidence.OCCLUSION`."""


@dataclass(frozen=True)
class Memory:
    """What the replay keeps for a policy: its state, its artefact and a seeded random generator."""

    state: State = field(default_factory=dict)
    artefact: Artefact | None = None
    rng: torch.Generator | None = None

    def generator(self) -> torch.Generator:
        """The seeded generator."""
        if self.rng is None:
            raise PolicyError("this replay gave the policy no random generator")
        return self.rng


class Policy:
    """Base class; subclass it as ``@dataclass(frozen=True)`` with a class attribute `card`."""

    card: ClassVar[Card]
    per_head: ClassVar[frozenset[str]] = frozenset()
    """Which of "score", "decide" and "read" answer for one KV head by that head alone, so that a long context can be
    shown head by head. A policy that does not say so is not asked to."""
    shares_over_layers: ClassVar[bool] = False
    """Whether layers get different parts of one budget, so that one of them alone says nothing."""
    compares_tokens: ClassVar[bool] = False
    """Whether tokens are compared with each other: work that grows with the square of the context."""
    reads_together: ClassVar[bool] = False
    """Whether `read` answers several queries, those of the newest positions and in one block, each as if it were alone
    and nothing had come after it. Known tokens are then fed up to the end of a block at once."""

    def __init_subclass__(cls, **given: Any) -> None:
        """Raise `PolicyError` for a method that cannot be called as the replay calls it."""
        super().__init_subclass__(**given)
        for name in ("fit", "observe", "score", "decide", "summarize", "read", "project"):
            own, asked = cls.__dict__.get(name), signature(getattr(Policy, name))
            if not isfunction(own):
                continue
            try:
                signature(own).bind(*asked.parameters)
            except TypeError:
                raise PolicyError(
                    f"policy class {cls.__name__}: {name}{signature(own)} must take ({', '.join(asked.parameters)})"
                ) from None

    def fit(self, source: Calibration) -> Artefact:
        """Learn an artefact offline; only for policies whose card says `When.OFFLINE`."""
        raise PolicyError(f"policy '{self.card.name}' has nothing to fit")

    def observe(self, state: State, step: StepView) -> State:
        """Carry what must be carried from step to step; the default carries nothing."""
        return state

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """Importance float [kv_heads, tokens] of a layer's tokens; higher is kept."""
        raise PolicyError(f"policy '{self.card.name}' has no score")

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Edits for all layers at once, from their scores; the default keeps the protected top-k."""
        return Decision(
            {
                index: [Evict(protected_top_k(scores[index], layer, budget.tokens))]
                for index, layer in cache.layers.items()
                if index in scores and layer.tokens > budget.tokens
            }
        )

    def summarize(self, block: BlockView) -> Mapping[str, Tensor]:
        """Packed side data [blocks, kv_heads, ...] of blocks that have just filled."""
        return {}

    def read(
        self, layer: LayerView, query: Tensor, memory: Memory, budget: Allowance, previous: ReadSet | None
    ) -> ReadSet | None:
        """What `query` [q_heads, queries, dim] may read of a layer; None reads all that is retained."""
        return None

    def project(self, layer: Layer, memory: Memory) -> LowRank | None:
        """What stands in for a layer's key and value projections where the method prefills by itself; None leaves them.

        The edit's bases, groups and biases alone count: what the projections put out, before norm and rotation, is
        encoded and rebuilt at once, for every token from the first on.
        """
        return None

    def taps_in(self, layers: int) -> frozenset[int]:
        """Decoder layers whose output `observe` is shown, in a model of so many layers; by default the card's."""
        return self.card.taps

    def not_applicable(self, context: int, longest: int, budget: Allowance) -> str | None:
        """Why the method has nothing to do on `context` tokens that grow to at most `longest`; None if it acts."""
        return None

    def check_ready(self) -> None:
        """Raise `PolicyError` if what it runs in beside this package is not there; asked before a run begins."""

    @property
    def unrotates(self) -> bool:
        """Whether it takes the rotation of keys or queries back, which not every RoPE allows here."""
        return Evidence.KEYS_UNROTATED in self.card.evidence

    @property
    def queries_needed(self) -> int:
        """How many of the newest queries a view must offer: a recording holds that many, a stepwise lane keeps them."""
        return 0

    @property
    def read_block(self) -> int:
        """Tokens of the blocks that `read` answers in; 1 if it names tokens."""
        return 1

    @property
    def fitted_by(self) -> Policy:
        """The policy whose artefact it uses: itself, of a twin its original."""
        return self

    # What a composition answers part by part (`kvassay.policy.compose`); a policy of one part needs none of these.

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The policies it is made of."""
        return (self,)

    @property
    def fixed_budgets(self) -> tuple[Budget, ...]:
        """Budgets that the policy brings along, beside the arm's."""
        return ()

    @property
    def summarizer(self) -> Policy:
        """Whose card says what a block's summary reads."""
        return self

    def spares(self, budget: Allowance, length: int) -> bool:
        """Whether this budget leaves a sequence of that length as it is, so that `decide` is not asked."""
        return budget.spares(length)

    def decides_at(self, *moments: When) -> bool:
        """Whether it edits the cache at any of these moments."""
        return self.writes_decide and bool(self.card.when & set(moments))

    def quiet(self, length: int, generated: int) -> int:
        """Of a policy that edits the cache while decoding: how many more tokens may come before it does so again.

        So many known tokens are fed at once; a subclass whose `decide` acts at other steps says so here.
        length: tokens in the cache, of which `generated` came after the context
        """
        if self.decides_at(When.EVERY_STEP) or not self.decides_at(When.EVERY_N):
            return 0
        return interval_of(self) - 1 - generated % interval_of(self)

    @property
    def query_ring(self) -> int:
        """How many of the newest queries an engine has to keep for its decisions while decoding."""
        asks = Evidence.QUERIES in self.card.evidence and self.decides_at(*STEPS)
        return self.queries_needed if asks else 0

    def refuses(self, prefill: Prefill) -> str | None:
        """Why it cannot be prefilled like that; None if it can."""
        return None

    # What the subclass wrote decides what the replay asks.

    @property
    def writes_score(self) -> bool:
        """True if the subclass has a scorer of its own."""
        return type(self).score is not Policy.score

    @property
    def writes_decide(self) -> bool:
        """True if the policy edits the cache (it has a scorer or a `decide` of its own)."""
        return self.writes_score or type(self).decide is not Policy.decide

    @property
    def writes_read(self) -> bool:
        """True if the policy selects what a query reads."""
        return type(self).read is not Policy.read

    @property
    def writes_project(self) -> bool:
        """True if the policy changes the model's projections."""
        return type(self).project is not Policy.project

    @property
    def writes_observe(self) -> bool:
        """True if the policy carries state from step to step."""
        return type(self).observe is not Policy.observe

    @property
    def writes_summarize(self) -> bool:
        """True if the policy keeps side data per full block."""
        return type(self).summarize is not Policy.summarize

    @property
    def parameters(self) -> dict[str, Any]:
        """The dataclass fields and their values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    @property
    def label(self) -> str:
        """Name, with the parameters that differ from their defaults."""
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)  # type: ignore[arg-type]
            if getattr(self, f.name) != f.default
        ]
        return self.card.name + (f"({', '.join(changed)})" if changed else "")


def protected_top_k(score: Tensor, layer: LayerView, keep: int) -> Tensor:
    """Keep mask bool [kv_heads, tokens]: the protected tokens, then the highest scores, `keep` per head.

    Ties go to the earlier token, so that a replay is deterministic.
    """
    return top_k_mask(score, layer.alive, layer.protected, keep)


def top_k_mask(score: Tensor, alive: Tensor, forced: Tensor, keep: int) -> Tensor:
    """The `keep` highest of `alive` per row, `forced` ones first; bool of the same shape.

    Raises `BudgetError` if more are forced than may be kept: what must stay is never dropped in silence.
    """
    if score.shape != alive.shape:
        raise PolicyError(f"scores of shape {list(score.shape)}, expected {list(alive.shape)} [kv_heads, tokens]")
    if not bool(torch.isfinite(score[alive]).all()):
        raise PolicyError("scores hold NaN or infinity; the score of every live token must be finite")
    most = int((forced & alive).sum(-1).max()) if forced.numel() else 0
    if most > keep:
        raise BudgetError(f"{keep} tokens may be kept and {most} must be; raise the budget or protect fewer")
    if not 0 < keep < score.shape[-1]:
        return alive & (keep > 0)
    order = score.masked_fill(forced, torch.inf).masked_fill(~alive, -torch.inf)
    # The least that is kept, found without a sort: time grows with the tokens and no faster.
    least = order.topk(keep, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, tied = order > least, order == least
    first = tied.cumsum(-1) <= keep - above.sum(-1, keepdim=True)
    return (above | (tied & first)) & alive


def interval_of(policy: Policy) -> int:
    """The field `interval` of a policy that acts every n tokens; `PolicyError` if it has none of at least 1."""
    interval = getattr(policy, "interval", None)
    if not isinstance(interval, int) or interval < 1:
        raise PolicyError(f"policy '{policy.card.name}' acts every n tokens and needs a field interval >= 1")
    return interval
