"""A policy's card: what it does, needs and approximates, declared once and enforced by the replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from kvassay.errors import PolicyError, did_you_mean
from kvassay.policy.budget import UNITS


class Effect(StrEnum):
    """What a policy does to the cache."""

    NONE = "none"
    EVICT = "evict"
    SELECT = "select"
    MERGE = "merge"
    QUANTIZE = "quantize"
    LOW_RANK = "low_rank"


class When(StrEnum):
    """When a policy is asked to decide or observe."""

    AFTER_PREFILL = "after_prefill"
    ON_WRITE = "on_write"
    """As a layer's new tokens are written, before any query reads them; for uncommitted tokens, when they settle. They
    may be encoded, nothing else: whoever comes later in the same pass reads what is left."""
    EVERY_STEP = "every_step"
    EVERY_N = "every_n"
    """Every `interval` generated tokens; the policy has a field of that name."""
    BLOCK_FULL = "block_full"
    """`summarize` is called for every block that fills."""
    OFFLINE = "offline"
    """`fit` runs before the replay, on text disjoint from the test."""


STEPS = (When.EVERY_STEP, When.EVERY_N)
"""While decoding, between two passes."""
LATE = (When.ON_WRITE, *STEPS)
"""Whenever tokens come after the context."""


class Evidence(StrEnum):
    """What a view may offer; touching anything that the card does not declare is an error."""

    KEYS = "keys"
    KEYS_UNROTATED = "keys_unrotated"
    VALUES = "values"
    QUERIES = "queries"
    """Post-RoPE queries of the last recorded prompt positions."""
    QUERY = "query"
    """This step's query (select policies)."""
    ATTENTION = "attention"
    """Attention rows of the last queries over the cached keys, causal."""
    HIDDEN = "hidden"
    """Hidden states: of the newest tokens, the outputs of the decoder layers in `taps` (`StepView.hidden`); of the
    context, the residual stream that enters a layer (`LayerView.hidden`)."""
    LAYER_INPUT = "layer_input"
    """What the layer's q, k and v projections read, for the context's tokens."""
    ROW_LSE = "row_lse"
    """Row log-sum-exp of the context's own queries: `exp(score - lse)` is a token's true attention."""
    BUCKET = "bucket"
    """Scores of the context's queries against the keys of their own bucket of consecutive positions."""
    WEIGHTS = "weights"
    """Offline: weights of each layer's key and value projections, and what passes of the model over the calibration
    text put in (`Calibration.weights`, `Calibration.passes`). Takes the model, which the open loop has not."""
    GRADIENTS = "gradients"
    """Offline: gradients of the language-model loss at those weights (`CalibrationPass.gradients`)."""
    OCCLUSION = "occlusion"
    """Offline: what blanking pieces of the calibration text does to the loss of its answer (`Calibration.occlusions`).
    Takes the model as well."""
    FUTURE_QUERIES = "future_queries"
    """Queries recorded after the decision: only the declared `hindsight` reference may ask."""


TAPS: Mapping[Evidence, Literal["hidden", "layer_input", "lse", "bucket"]] = MappingProxyType(
    {
        Evidence.HIDDEN: "hidden",
        Evidence.LAYER_INPUT: "layer_input",
        Evidence.ROW_LSE: "lse",
        Evidence.BUCKET: "bucket",
    }
)
"""Evidence that a trace holds as a tap, and the tap's kind."""


class Approximates(StrEnum):
    """What of the retained state is no longer what the model wrote."""

    VALUES = "values"
    KEYS = "keys"
    LOGITS = "logits"


class Prefill(StrEnum):
    """Whether arms fork one dense prefill, or the method changes what prefill reads."""

    SHARED_DENSE = "shared_dense"
    OWN = "own"


@dataclass(frozen=True)
class Card:
    """A policy's declaration. `approximates` empty means exact attention over what is retained."""

    name: str
    effects: frozenset[Effect]
    source: str
    """Paper section, thread or code the method is from."""
    summary: str
    when: frozenset[When] = frozenset({When.AFTER_PREFILL})
    unit: str = "token"
    evidence: frozenset[Evidence] = frozenset()
    acts_on: frozenset[str] = frozenset({"full"})
    """Layer kinds the method may touch; window-bounded layers are left alone unless named here."""
    approximates: frozenset[Approximates] = frozenset()
    prefill: Prefill = Prefill.SHARED_DENSE
    budgets: frozenset[str] = frozenset({"keep_tokens"})
    """Budget units the method can honour; empty for methods whose size is a parameter (dense, fp8, kivi)."""
    taps: frozenset[int] = frozenset()
    reference: bool = False
    """A yardstick that no engine could run (it sees the future, or scans all keys), not a candidate."""
    external: bool = False
    """Another project's code decides, in an environment of its own; the source says whose."""
    reconstruction: bool = False
    gaps: tuple[str, ...] = ()
    """What the source leaves unsaid and we filled in; only with `reconstruction=True`."""
    deviations: tuple[str, ...] = ()
    """Where we knowingly depart from the published method, and why."""
    limits: tuple[str, ...] = ()
    """Where the method does not apply, and how it is known to fail."""

    def __post_init__(self) -> None:
        kinds = {"effects": Effect, "when": When, "evidence": Evidence, "approximates": Approximates}
        allowed = {key: [str(one) for one in kind] for key, kind in kinds.items()}
        for key, known in {**allowed, "budgets": list(UNITS.values())}.items():
            for item in getattr(self, key):
                if item not in known:
                    raise PolicyError(f"card '{self.name}': no {key} '{item}'{did_you_mean(str(item), known)}")
        if self.gaps and not self.reconstruction:
            raise PolicyError(f"card '{self.name}': gaps are listed, so reconstruction must be true")
        if Evidence.FUTURE_QUERIES in self.evidence and not self.reference:
            raise PolicyError(f"card '{self.name}': only a reference may ask for future queries")
        if self.taps and Evidence.HIDDEN not in self.evidence:
            raise PolicyError(f"card '{self.name}' taps layers {sorted(self.taps)} without the evidence 'hidden'")

    @property
    def per_step(self) -> bool:
        """True if the replay may not feed this policy any number of tokens at once: `Lane.takes` says how many."""
        return bool(self.when & {*STEPS, When.BLOCK_FULL}) or (Effect.SELECT in self.effects)

    @property
    def exact(self) -> bool:
        """True if attention over what is retained is exact."""
        return not self.approximates
