"""How much the hidden state moves from one token to the next, as EpiKV scores it (arXiv 2606.26472, section 3).

g(t) = ||h(t) - h(t - 1)|| at a layer; its rolling z-score takes out the drift with position.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

EPSILON = 1e-6
State = Mapping[str, Tensor]


def advance(state: State, early: Tensor, late: Tensor, window: int) -> tuple[dict[str, Tensor], Tensor]:
    """The state after new tokens, and their scores [tokens]: z of the early layer less z of the late one.

    early, late: outputs of two decoder layers for the new tokens, [tokens, hidden]
    The state is the two last hidden states and the last `window` changes at each layer.
    """
    moves = torch.stack([_moves(state.get("early"), early), _moves(state.get("late"), late)])
    ring = torch.cat([state.get("moves", moves[:, :0]), moves], 1)
    first = ring.shape[1] - moves.shape[1]
    z = [z_score(ring[:, max(0, at + 1 - window) : at + 1]) for at in range(first, ring.shape[1])]
    after = {"moves": ring[:, -window:].clone(), "early": early[-1].clone(), "late": late[-1].clone()}
    return after, torch.stack([pair[0] - pair[1] for pair in z])


def z_score(window: Tensor) -> Tensor:
    """z-score [layers] of the newest column of [layers, n] in its row, NaN left out; 0 where nothing varies."""
    count = (~window.isnan()).sum(1)
    mean = window.nanmean(1)
    spread = ((window - mean[:, None]).square().nansum(1) / count.clamp(min=1)).sqrt()
    return ((window[:, -1] - mean) / (spread + EPSILON)).nan_to_num(nan=0.0)


def _moves(before: Tensor | None, hidden: Tensor) -> Tensor:
    """||h(t) - h(t - 1)|| of each new token; NaN for the first of all."""
    last = torch.full_like(hidden[0], torch.nan) if before is None else before
    return (hidden - torch.cat([last[None], hidden[:-1]])).norm(dim=-1)
