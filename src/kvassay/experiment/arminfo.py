"""What a report says of an arm; kept with the results, so that no policy is imported to show them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ArmInfo:
    """One arm in words."""

    label: str
    policy: str
    """The card's name."""
    budget: str | None
    """Text form, as in the experiment file."""
    exact: bool
    """Exact attention over what is retained; False: values, keys or logits are approximated."""
    approximates: tuple[str, ...]
    reference: bool
    """A yardstick that no engine could run."""
    reconstruction: bool
    """Not from the method's own text, or gaps were filled in."""
    always_on: bool
    """Runs beside every candidate."""
    source: str
    summary: str
    gaps: tuple[str, ...] = ()
    deviations: tuple[str, ...] = ()
    own_prefill: bool = False
    """Prefilled with the policy in the loop; False: forked from the dense prefill that all others share."""
    effects: tuple[str, ...] = ()
    """What the policy does to the cache, as in its card; empty in a run of an older version, as are the next four."""
    when: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    acts_on: tuple[str, ...] = ()
    """Layer kinds it may touch."""
    unit: str = ""
