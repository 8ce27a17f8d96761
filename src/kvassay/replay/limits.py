"""Which policies a long context can be replayed under, and why not, with the estimate."""

from __future__ import annotations

from kvassay.layout.model import Layer
from kvassay.policy.acting import may_act
from kvassay.policy.card import TAPS, Effect, Evidence, Prefill, When
from kvassay.policy.checks import too_long
from kvassay.replay.arms import Arm

GIB = 2**30


def refusal(arm: Arm, layer: Layer, context: int, question: int) -> str | None:
    """Why an arm is not replayed head by head on a layer of `context` tokens, or None if it is.

    question: tokens decoded after the context
    """
    policy, card = arm.policy, arm.policy.card
    if arm.prefill is Prefill.OWN:
        return "prefills with the policy in the loop, which takes the model"
    if arm.again:
        return "is dense in another batch split; one layer has none"
    if Effect.NONE not in card.effects and not may_act(card, layer):
        return f"does not act on {layer.kind} layers"
    if taps := sorted(TAPS[kind] for kind in card.evidence & TAPS.keys()):
        return f"needs {', '.join(taps)} of every token, which only a model gives"
    if When.OFFLINE in card.when:
        return "learns offline from a model's text"
    if policy.shares_over_layers:
        return "shares one budget out over the layers; one layer is replayed at a time"
    if policy.writes_observe:
        return "carries state from step to step over all layers"
    return too_long(policy, layer, context) or _not_apart(arm, layer, context) or _late(arm, question)


def _not_apart(arm: Arm, layer: Layer, context: int) -> str | None:
    """A policy whose work on one KV head is not known to be that head's alone, and which looks at keys or values."""
    policy = arm.policy
    written = {"score": policy.writes_score, "decide": policy.writes_decide, "read": policy.writes_read}
    asked = {name for name, own in written.items() if own}
    lacking = asked - policy.per_head
    seen = policy.card.evidence & {Evidence.KEYS, Evidence.KEYS_UNROTATED, Evidence.VALUES, Evidence.QUERY}
    decides_by_scores = lacking == {"decide"} and "score" in asked
    if not lacking or decides_by_scores or not seen:
        return None
    size = context * layer.kv.elements * 4 / GIB
    return (
        f"is not known to {' and '.join(sorted(lacking))} one KV head at a time; all heads of a layer take "
        f"{size:.1f} GiB in float32 at {context} tokens"
    )


def _late(arm: Arm, question: int) -> str | None:
    """A policy that only acts while decoding, later than the question ends."""
    policy = arm.policy
    if policy.writes_decide and When.AFTER_PREFILL not in policy.card.when and not policy.decides_at(When.EVERY_STEP):
        return f"acts on generated tokens alone, and {question} are replayed"
    return None
