"""How much the hidden state moves from one token to the next, as EpiKV scores it (arXiv 2606.26472, section 3).

g(t) = ||h(t) - h(t - 1)|| at a layer; its rolling z-score takes out the drift with position.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

EPSILON = 1e-6
State = Mapping[str, Tensor]


def advance(state: State, hidden: Tensor, window: int) -> tuple[dict[str, Tensor], Tensor]:
    """The state after new tokens, and their z-scores [layers, tokens].

    hidden: outputs of some decoder layers for the new tokens, [layers, tokens, hidden]
    The state is the last hidden states and the last `window` changes at each layer.
    """
    moves = changes(hidden, state.get("hidden"))
    ring = torch.cat([state.get("moves", moves[:, :0]), moves], 1)
    first = ring.shape[1] - moves.shape[1]
    z = [z_score(ring[:, max(0, at + 1 - window) : at + 1]) for at in range(first, ring.shape[1])]
    return {"moves": ring[:, -window:].clone(), "hidden": hidden[:, -1].clone()}, torch.stack(z, 1)


def z_score(window: Tensor) -> Tensor:
    """z-score float64 [layers] of the newest column of [layers, n] in its row, NaN left out; 0 where nothing varies.

    In float64: two changes alone score 1 each but for epsilon, and layers are told apart by it.
    """
    window = window.double()
    count = (~window.isnan()).sum(1)
    mean = window.nanmean(1)
    spread = ((window - mean[:, None]).square().nansum(1) / count.clamp(min=1)).sqrt()
    return ((window[:, -1] - mean) / (spread + EPSILON)).nan_to_num(nan=0.0)


def changes(hidden: Tensor, before: Tensor | None = None) -> Tensor:
    """||h(t) - h(t - 1)|| [layers, tokens] of hidden [layers, tokens, hidden]; NaN for the first of all.

    before: hidden states [layers, hidden] of the token before
    """
    last = torch.full_like(hidden[:, 0], torch.nan) if before is None else before
    return (hidden - torch.cat([last[:, None], hidden[:, :-1]], 1)).norm(dim=-1)
