"""Which method makes sense on which kind of attention state: applicable, redundant or blocked, and why.

For the candidates it is a table; for any other policy it follows from its card.

The reasons rest on what engines do, as read in vLLM 0.32 and 0.33: one block table per KV cache group is passed whole
to attention; blocks are freed or nulled whole; MLA caches one latent per token for all heads; DeepSeek's and
MiniMax-M3's models choose what they read with trained indexers. `tests/policy/test_applicability.py` pins those facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from kvassay.layout.model import Layer
from kvassay.policy.card import Card, Effect, Evidence

Answer = Literal["applicable", "redundant", "blocked"]

STATES: Mapping[str, str] = MappingProxyType(
    {
        "gqa": "full attention, keys and values per KV head (GQA, MQA, MHA)",
        "sliding": "sliding-window layers, bounded by their window",
        "mla": "one latent and one rotary part per token for all heads, all of it read (dense MLA)",
        "mla_index": "MLA with a trained index that selects tokens (DSA: DeepSeek-V3.2, GLM-5.2)",
        "v4": "pooled entries of several tokens beside a short window (DeepSeek-V4)",
        "block_sparse": "GQA whose trained index selects blocks of 128 tokens (MiniMax-M3)",
    }
)


@dataclass(frozen=True)
class Cell:
    """One candidate on one kind of state."""

    answer: Answer
    reason: str


_BOUNDED = Cell("redundant", "the window bounds the state already; positions beyond it are never read again")
_POOLED = Cell("blocked", "an entry stands for several tokens: a decision per token has nothing to act on")
_FOLDED = Cell(
    "blocked",
    "entries stay with the model's own compressors, key and value in one, where no code of keys and values takes their "
    "place; engines pack them in a format of their own (fp8_ds_mla)",
)
_ONE_LATENT = "the latent serves all heads, so there are no KV heads to tell apart"

_TABLE: Mapping[str, Mapping[str, Cell]] = MappingProxyType(
    {
        "locks": {
            "gqa": Cell("applicable", "needs a block list per KV head in the decode kernel; nothing is freed"),
            "sliding": _BOUNDED,
            "mla": Cell("applicable", f"bases of the 576-wide latent key; {_ONE_LATENT}: one list for all"),
            "mla_index": Cell("redundant", "the trained index already selects what is read"),
            "v4": Cell("redundant", "a trained index already selects pooled entries; pages of tokens do not exist"),
            "block_sparse": Cell("redundant", "the trained index already selects blocks per KV head"),
        },
        "rdkv": {
            "gqa": Cell("applicable", "needs packed mixed-bit storage and per-head token sets"),
            "sliding": _BOUNDED,
            "mla": Cell("blocked", f"widths go to value tokens and key channels per KV head; {_ONE_LATENT}"),
            "mla_index": Cell("blocked", f"as on dense MLA ({_ONE_LATENT}), and index keys must stay with every token"),
            "v4": _POOLED,
            "block_sparse": Cell(
                "applicable",
                "stored state is GQA's; dropped tokens must keep their index keys out of the block maximum",
            ),
        },
        "epikv": {
            "gqa": Cell(
                "applicable", "one decision for all layers, slots reused under the shared table; needs two taps"
            ),
            "sliding": _BOUNDED,
            "mla": Cell("applicable", "decides from hidden states alone; one slot per token and layer as on GQA"),
            "mla_index": Cell(
                "applicable", "as on dense MLA; the index key of a reused slot must be rewritten with it"
            ),
            "v4": _POOLED,
            "block_sparse": Cell(
                "blocked", "reused slots break the order of positions on which blocks of 128 are anchored"
            ),
        },
        "selkv": {
            "gqa": Cell("applicable", "needs a log bias per slot in the kernel, and copies of shared blocks"),
            "sliding": _BOUNDED,
            "mla": Cell("blocked", "values are the latent that is also the key: merging one changes the other"),
            "mla_index": Cell("blocked", "values are the latent that is also the key: merging one changes the other"),
            "v4": _POOLED,
            "block_sparse": Cell(
                "blocked", "compacted tokens leave the blocks of 128 to which the index's maxima belong"
            ),
        },
        "dynacalkv": {
            "gqa": Cell("applicable", "needs low-rank projections in the GQA path and a rebuild before RoPE"),
            "sliding": Cell("applicable", "projections may be factored in any layer; what it saves is bounded"),
            "mla": Cell("redundant", "MLA is a trained low-rank projection of keys and values already"),
            "mla_index": Cell("redundant", "MLA is a trained low-rank projection of keys and values already"),
            "v4": Cell("redundant", "keys and values share one trained low-rank entry already"),
            "block_sparse": Cell("applicable", "stored state is GQA's; index keys are apart and stay"),
        },
        "kara": {
            "gqa": Cell("applicable", "needs compaction in decode, and queries of the window kept or recomputed"),
            "sliding": _BOUNDED,
            "mla": Cell("applicable", f"{_ONE_LATENT}, as its one list per layer wants"),
            "mla_index": Cell("applicable", "as on dense MLA; index keys are compacted with their tokens"),
            "v4": _POOLED,
            "block_sparse": Cell(
                "blocked", "compacted tokens leave the blocks of 128 to which the index's maxima belong"
            ),
        },
    }
)

CANDIDATES = tuple(_TABLE)
"""The methods judged, by the name of their policy."""


def applicability() -> dict[str, dict[str, Cell]]:
    """Candidate -> kind of state -> answer."""
    return {name: dict(row) for name, row in _TABLE.items()}


def state_of(layer: Layer) -> str | None:
    """The kind of attention state a layer keeps, of `STATES`; None for one that only reads another's cache."""
    kinds = {"full": "gqa", "sliding": "sliding", "pooled": "v4", "block_sparse": "block_sparse"}
    if layer.kind == "latent":
        return "mla" if layer.topk is None else "mla_index"
    return kinds.get(layer.kind)


def judged(card: Card, state: str) -> Cell:
    """The table's answer on a kind of state, or for a policy that is no candidate what follows from its card."""
    named = _TABLE.get(card.name, {}).get(state)
    if named is not None:
        return named
    rules = {
        "sliding": _on_window,
        "mla": _on_latent,
        "mla_index": _on_latent,
        "v4": _on_pooled,
        "block_sparse": _on_blocks,
    }
    found = rules[state](card, state) if state in rules and Effect.NONE not in card.effects else None
    return found or Cell("applicable", "nothing in its card speaks against it")


_PROJECTIONS = Evidence.WEIGHTS, Evidence.GRADIENTS, Evidence.LAYER_INPUT


def _on_window(card: Card, state: str) -> Cell | None:
    return None if "sliding" in card.acts_on else _BOUNDED


def _on_latent(card: Card, state: str) -> Cell | None:
    """One vector per token is key and, in its beginning, value of every head."""
    if Effect.LOW_RANK in card.effects:
        return _TABLE["dynacalkv"][state]
    if Effect.SELECT in card.effects and state == "mla_index":
        return _TABLE["locks"][state]
    if Effect.MERGE in card.effects:
        return _TABLE["selkv"][state]
    if Effect.QUANTIZE in card.effects and "key channel" in card.unit:
        return Cell("blocked", "key channels are treated apart from values, and in a latent they are its values too")
    if "head budget" in card.unit:
        return Cell("redundant", f"it shares a budget out among KV heads; {_ONE_LATENT}")
    if card.external:
        return Cell("blocked", "it is asked with keys and values of every head, which a latent layer does not keep")
    if set(_PROJECTIONS) & card.evidence:
        return Cell("blocked", "there are no projections that make keys and values of a token alone")
    return None


def _on_pooled(card: Card, state: str) -> Cell | None:
    if "pooled" in card.acts_on:
        return None
    return _FOLDED if {Effect.QUANTIZE, Effect.LOW_RANK} & card.effects and not card.budgets else _POOLED


def _on_blocks(card: Card, state: str) -> Cell | None:
    if Effect.SELECT in card.effects:
        return _TABLE["locks"][state]
    if Effect.MERGE in card.effects:
        return Cell(
            "blocked", "a token merged into another block's would be read by an index score that is not its own"
        )
    return None
