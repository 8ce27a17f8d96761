"""What pieces of a text are to an answer: each blanked in turn, the answer's loss taken in batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvassay.policy.weights import Occlusions
from kvassay.record.calling import decoder_layers, last_rows

BATCH = 8
"""Blanked texts in one pass."""


def occlusions(model: Any, text: Tensor, asked: Tensor, answer: int, width: int, stride: int) -> Occlusions:
    """Blank every `stride`-th piece of `width` tokens of `text` int64 [tokens] with the model's padding token.

    asked: int64, question and answer, of which the last `answer` tokens count
    """
    device = next(model.parameters()).device
    starts = torch.arange(0, len(text) - width + 1, stride)
    ids = torch.cat([text, asked]).repeat(len(starts), 1)
    ids.scatter_(1, starts[:, None] + torch.arange(width), _padding(model))
    hidden: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_hook(
            lambda module, given, out, i=i: hidden.__setitem__(i, (out[0] if isinstance(out, tuple) else out)[0])
        )
        for i, layer in enumerate(decoder_layers(model))
    ]
    with torch.inference_mode():
        try:
            whole = _loss(model, torch.cat([text, asked])[None].to(device), answer)
        finally:
            for hook in hooks:
                hook.remove()
        blanked = torch.cat([_loss(model, batch.to(device), answer) for batch in ids.split(BATCH)])
    kept = {layer: states[: len(text)].float().cpu() for layer, states in hidden.items()}
    return Occlusions(starts, width, (blanked - whole).cpu(), kept)


def _padding(model: Any) -> int:
    """The padding token, or what stands in for one: end of text, or token 0."""
    named = (model.config.pad_token_id, model.config.eos_token_id)
    found = next((one for one in named if one is not None), 0)
    return int(found[0] if isinstance(found, list) else found)


def _loss(model: Any, ids: Tensor, answer: int) -> Tensor:
    """Mean loss [texts] over the last `answer` tokens of ids [texts, tokens], nats."""
    kept = last_rows(ids.shape[1], answer + 1)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits.float()
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, -answer:], reduction="none")
    return losses.mean(1)
