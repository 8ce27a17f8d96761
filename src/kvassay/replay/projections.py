"""The key and value projections of a transformers model: found, read, run for calibration, stood in for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvassay.cache.edits import LowRank
from kvassay.cache.encoded import low_rank_keys, low_rank_values
from kvassay.errors import PolicyError
from kvassay.layout.model import KV, Layer
from kvassay.policy.weights import CalibrationPass, HeadNorm, LayerGradients, LayerWeights, Projection
from kvassay.record.calling import decoder_layers


def attention_of(model: Any, layer: Layer) -> Any:
    """The attention module of a layer whose keys and values come from a linear `k_proj` and `v_proj` each.

    `PolicyError` for another: fused or latent projections, keys that serve as values, normalised values.
    """
    module = getattr(decoder_layers(model)[layer.index], "self_attn", None)
    linear = [isinstance(getattr(module, name, None), nn.Linear) for name in ("k_proj", "v_proj")]
    if module is None or not all(linear) or layer.v_norm or not isinstance(layer.components[0].storage, KV):
        raise PolicyError(
            f"layer {layer.index} of {model.config.model_type} has no linear k_proj and v_proj that make its keys and "
            "un-normalised values: a method on projection weights cannot act on it"
        )
    return module


def layer_weights(model: Any, layer: Layer) -> LayerWeights:
    """The projections of one layer, copied to float32 on the CPU; `PolicyError` if there are none to be had."""
    module = attention_of(model, layer)
    key, value = (_projection(getattr(module, name)) for name in ("k_proj", "v_proj"))
    norm = getattr(module, "k_norm", None) if layer.qk_norm else None
    if layer.qk_norm and norm is None:
        raise PolicyError(f"layer {layer.index} of {model.config.model_type} normalises its keys, not by a 'k_norm'")
    return LayerWeights(key, value, None if norm is None else _head_norm(norm, layer))


def output_projection(model: Any, layer: Layer) -> Projection:
    """The projection after attention [hidden, q_heads * dim], as `layer_weights`; `PolicyError` without one."""
    module = getattr(attention_of(model, layer), "o_proj", None)
    if not isinstance(module, nn.Linear):
        raise PolicyError(f"layer {layer.index} of {model.config.model_type} has no linear o_proj")
    return _projection(module)


def _projection(linear: nn.Linear) -> Projection:
    bias = None if linear.bias is None else linear.bias.detach().float().cpu()
    return Projection(linear.weight.detach().float().cpu(), bias)


def _head_norm(norm: nn.Module, layer: Layer) -> HeadNorm:
    """Read off an RMS norm over the head dimension, whatever it calls its parts; `PolicyError` for another norm."""
    dim = layer.kv.k_dim
    eps = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) or 0.0)
    probe = torch.linspace(-1, 2, dim)
    with torch.no_grad():
        like = next(norm.parameters())
        try:
            ones, shown = (norm(x.to(like.device, like.dtype)).float().cpu() for x in (torch.ones(dim), probe))
        except RuntimeError:
            ones = shown = torch.full((dim,), torch.nan)
    weight = ones * (1 + eps) ** 0.5
    expected = probe * torch.rsqrt(probe.square().mean() + eps) * weight
    if not torch.allclose(shown, expected, rtol=1e-2 if like.dtype.itemsize < 4 else 1e-5, atol=1e-6):
        raise PolicyError(f"the key norm of layer {layer.index} is not an RMS norm over its {dim} head dimensions")
    return HeadNorm(weight, eps)


@contextmanager
def _hooked(handles: Iterable[Any]) -> Iterator[None]:
    held = list(handles)
    try:
        yield
    finally:
        for handle in held:
            handle.remove()


def calibration_pass(model: Any, ids: Tensor, layers: Sequence[Layer], gradients: bool) -> CalibrationPass:
    """Run the model over `ids` int64 [tokens], with the gradient of its mean next-token loss if asked for."""
    modules = {layer.index: attention_of(model, layer) for layer in layers}
    weights = [weight for module in modules.values() for weight in (module.k_proj.weight, module.v_proj.weight)]
    ids = ids.to(next(model.parameters()).device)
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(gradients),
        _differentiable(weights if gradients else []),
        inputs_kept(model, layers) as inputs,
    ):
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        read = {index: rows[0] for index, rows in inputs.items()}
        if not gradients:
            return CalibrationPass(read, {})
        loss = nn.functional.cross_entropy(logits[:-1], ids[1:])
        found = [gradient.float().cpu() for gradient in torch.autograd.grad(loss, weights)]
    pairs = zip(modules, found[::2], found[1::2], strict=True)
    return CalibrationPass(read, {index: LayerGradients(key, value) for index, key, value in pairs})


@contextmanager
def _differentiable(weights: Sequence[nn.Parameter]) -> Iterator[None]:
    before = [weight.requires_grad for weight in weights]
    for weight in weights:
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for weight, was in zip(weights, before, strict=True):
            weight.requires_grad_(was)


@contextmanager
def standing_in(model: Any, layers: Sequence[Layer], rows: Mapping[int, Mapping[int, LowRank]]) -> Iterator[None]:
    """While inside, what the projections put out for some rows of the batch is encoded and rebuilt by an edit.

    rows: batch row -> layer -> the edit that stands in for its projections
    """
    wanted = {layer for edits in rows.values() for layer in edits}
    handles = []
    for index in wanted:
        module = attention_of(model, layers[index])
        edits = {row: mine[index] for row, mine in rows.items() if index in mine}
        for name, side in (("k_proj", _keys), ("v_proj", _values)):
            handles.append(getattr(module, name).register_forward_hook(_replacing(edits, side, layers[index])))
    with _hooked(handles):
        yield


@contextmanager
def inputs_kept(model: Any, layers: Iterable[Layer]) -> Iterator[dict[int, Tensor]]:
    """While inside, what each layer's projections read, by layer: float32 [batch, tokens, hidden]."""
    found: dict[int, Tensor] = {}

    def keep(index: int) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, arguments: Any) -> None:
            found[index] = arguments[0].detach().float().cpu()

        return hook

    modules = {layer.index: attention_of(model, layer) for layer in layers}
    with _hooked([m.k_proj.register_forward_pre_hook(keep(i)) for i, m in modules.items()]):
        yield found


Side = Callable[[LowRank, Tensor], Tensor]


def _keys(edit: LowRank, rows: Tensor) -> Tensor:
    return low_rank_keys(edit, rows).decode()


def _values(edit: LowRank, rows: Tensor) -> Tensor:
    return low_rank_values(edit, rows).decode()


def _replacing(edits: Mapping[int, LowRank], side: Side, layer: Layer) -> Callable[..., Tensor]:
    def hook(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        out = output.clone()
        for row, edit in edits.items():
            heads = output[row].float().cpu().unflatten(-1, (layer.kv.kv_heads, -1)).transpose(0, 1)
            out[row] = side(edit, heads).transpose(0, 1).flatten(1).to(out)
        return out

    return hook
