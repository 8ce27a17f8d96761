"""The process that runs in kvpress's environment and answers which tokens a press keeps; knows nothing of kvassay.

    python helper.py

Messages go over standard input and output: a line of JSON, whose `bytes` says how many bytes of safetensors follow.
The first message out says which versions run; then each question gets one answer, until the input ends.

A press expects a model's attention module and its hidden states. It gets neither: it gets a stand-in whose hidden
states *are* the recorded queries and keys before rotation, and whose projections read them off. So a press computes
from the recorded keys, values and queries exactly what it would inside the model, and no weights are loaded.
Queries that were not recorded are NaN, so that a press that reads them is found out.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from safetensors.torch import load, save
from torch import Tensor

FORCED = 1e30
"""Score of a token that must stay; finite, since presses multiply scores."""
MOST_ATTENTION_BYTES = 2 << 30
"""Largest attention map [q_heads, tokens, tokens] that is made for a press that sums a whole one."""


def send(stream: BinaryIO, header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write one message."""
    body = save({name: t.cpu().contiguous() for name, t in tensors.items()}) if tensors else b""
    stream.write(json.dumps({**header, "bytes": len(body)}).encode() + b"\n")
    stream.write(body)
    stream.flush()


def receive(stream: BinaryIO) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Read one message; None at the end, or where it breaks off. `ValueError` if it is not one."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    header = json.loads(line)
    if not isinstance(header, dict) or not isinstance(header.get("bytes"), int):
        raise ValueError(f"not a message: {line[:80]!r}")
    body = stream.read(header["bytes"])
    if len(body) < header["bytes"]:
        return None
    return header, load(body) if body else {}


class Rotary:
    """Cosines and sines as transformers' rotary embedding gives them: [1, positions, dim]."""

    def __init__(self, inv_freq: Tensor) -> None:
        self.inv_freq = inv_freq

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Of integer positions [1, positions], in x's dtype."""
        angle = position_ids.float()[..., None] * self.inv_freq
        both = torch.cat([angle, angle], dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., tokens, dim] in halves, as Llama does."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class Recorded:
    """A layer as a press is shown it: `keys`, `values` [1, kv_heads, tokens, dim] and what stands in for the model."""

    def __init__(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.keys, self.values = tensors["keys"][None], tensors["values"][None]
        _, kv_heads, tokens, dim = self.keys.shape
        rotary = Rotary(tensors.get("inv_freq", torch.zeros(dim // 2)))
        cos, sin = rotary(self.keys, torch.arange(tokens)[None])
        q_heads = int(header["q_heads"])
        queries = torch.full((q_heads, tokens, dim), torch.nan)
        if "queries" in tensors:
            queries[:, tokens - tensors["queries"].shape[1] :] = tensors["queries"]
        parts = (queries, rotate(self.keys[0], cos, -sin))
        self.hidden = torch.cat([part.transpose(0, 1).flatten(1) for part in parts], dim=-1)[None]
        self.attentions = None
        if header["attention"]:
            self.attentions = attention(rotate(queries, cos, sin), self.keys[0], float(header["scale"]))[None]
        self.kwargs = {"position_embeddings": (cos, sin), "hidden_states": self.hidden}
        config = SimpleNamespace(
            num_attention_heads=q_heads,
            num_key_value_heads=kv_heads,
            num_hidden_layers=header["layers"],
            head_dim=dim,
            hidden_size=0,
            _attn_implementation="eager" if header["attention"] else "sdpa",
        )
        self.module = SimpleNamespace(
            config=config,
            head_dim=dim,
            layer_idx=header["ordinal"],
            num_key_value_groups=q_heads // kv_heads,
            rotary_emb=rotary,
            q_proj=lambda hidden: hidden[..., : q_heads * dim],
            k_proj=lambda hidden: hidden[..., q_heads * dim :],
            masked_key_indices=None,
        )
        if "output" in tensors:
            config.hidden_size = tensors["output"].shape[0]
            self.module.o_proj = SimpleNamespace(weight=tensors["output"])


def attention(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Causal attention [q_heads, tokens, tokens] of all queries; `ValueError` where that is too large to hold."""
    heads, tokens, _ = q.shape
    if heads * tokens**2 * 4 > MOST_ATTENTION_BYTES:
        raise ValueError(f"{heads} attention maps of {tokens} x {tokens} are over {MOST_ATTENTION_BYTES >> 30} GiB")
    logits = q @ k.repeat_interleave(heads // len(k), dim=0).transpose(1, 2) * scale
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return logits.masked_fill_(future, -torch.inf).softmax(-1)


def located(rows: Tensor, among: Tensor) -> Tensor:
    """Where each of `rows` [heads, n, dim] is in `among` [heads, tokens, dim], bit by bit: int64 [heads, n].

    Of equal rows the first kept is the first there is. `ValueError` if one is not among them: it was changed.
    """
    weights = torch.randint(-(2**62), 2**62, rows.shape[-1:], generator=torch.Generator().manual_seed(0)) | 1
    found = []
    for mine, all_of_them in zip(rows, among, strict=True):
        sums = [(x.contiguous().view(torch.int32).long() * weights).sum(-1) for x in (mine, all_of_them)]
        kept, order = sums[0].sort(stable=True)
        there, where = sums[1].sort(stable=True)
        copy = torch.arange(len(kept)) - torch.searchsorted(kept, kept)
        at = where[(torch.searchsorted(there, kept) + copy).clamp(max=len(there) - 1)]
        found.append(torch.empty_like(at).scatter_(0, order, at))
        if not torch.equal(all_of_them[found[-1]].view(torch.int32), mine.contiguous().view(torch.int32)):
            raise ValueError("the press changed keys or values; only presses that keep them or not can be asked")
    return torch.stack(found)


def build(kvpress: Any, names: list[str], ratio: float, options: Mapping[str, Any]) -> list[Any]:
    """The presses, outermost first; each option goes to the first that takes it. `ValueError` if none does."""
    kinds = [getattr(kvpress, name) for name in names]
    taken: list[dict[str, Any]] = [{} for _ in kinds]
    for key, value in options.items():
        takers = [own for own, kind in zip(taken, kinds, strict=True) if key in inspect.signature(kind).parameters]
        if not takers:
            raise ValueError(f"no option '{key}' in {'('.join(names)}{')' * (len(names) - 1)}")
        takers[0][key] = value
    presses = [kinds[-1](compression_ratio=ratio, **taken[-1])]
    for kind, own in zip(kinds[-2::-1], taken[-2::-1], strict=True):
        presses.insert(0, kind(press=presses[0], **own))
    return presses


def guarded(press: Any, layer: Recorded, forced: Tensor, seen: dict[str, Tensor]) -> Callable[..., Tensor]:
    """The press's scorer, with tokens that must stay above all others; what it scored goes to `seen`."""
    original: Callable[..., Tensor] = press.score

    def score(module: Any, hidden: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any) -> Tensor:
        found = original(module, hidden, keys, values, attentions, kwargs)
        if not bool(torch.isfinite(found).all()):
            raise ValueError(f"{type(press).__name__} scored NaN or infinity; it may read queries that are not there")
        mine = forced
        if keys.shape[2] == forced.shape[1]:
            seen["score"] = found[0].clone()
        else:
            mine = forced.gather(1, located(keys[0], layer.keys[0]))
        return found.masked_fill(mine, FORCED) if bool(mine.any()) else found

    return score


def answer(kvpress: Any, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`keep` bool [kv_heads, tokens]: what the press leaves; and the outermost `score` [kv_heads, tokens], if any."""
    layer, forced = Recorded(header, tensors), tensors["forced"]
    tokens = forced.shape[1]
    # A ratio from which int(tokens * (1 - ratio)) is exactly what may be kept.
    presses = build(kvpress, header["press"], 1 - (header["keep"] + 1e-9) / tokens, header["options"])
    torch.manual_seed(header["seed"])
    seen: dict[str, Tensor] = {}
    for press in reversed(presses):
        if isinstance(press, kvpress.ScorerPress):
            press.score = guarded(press, layer, forced, seen)
    k, v = presses[0].compress(layer.module, layer.hidden, layer.keys, layer.values, layer.attentions, layer.kwargs)
    if layer.module.masked_key_indices is not None:
        keep = torch.ones_like(forced)
        _, heads, gone = layer.module.masked_key_indices
        keep[heads, gone] = False
    else:
        rows = located(torch.cat([k, v], -1)[0], torch.cat([layer.keys, layer.values], -1)[0])
        keep = torch.zeros_like(forced).scatter_(1, rows, True)
    return {"keep": keep, **seen}


def main() -> None:
    """Answer until the input ends."""
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a press prints must not get between messages
    # One thread: answers depend on no core count, and LU of several matrices fails on two (torch 2.13, oneMKL).
    torch.set_num_threads(1)
    import kvpress
    import transformers

    version = __import__("importlib.metadata").metadata.version("kvpress")
    send(answers, {"kvpress": version, "transformers": transformers.__version__, "torch": torch.__version__})
    while (question := receive(questions)) is not None:
        try:
            with torch.inference_mode():
                reply = answer(kvpress, *question)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            send(answers, {"error": f"{type(error).__name__}: {lines[0]}".rstrip(": ")})
        else:
            send(answers, {}, reply)


if __name__ == "__main__":
    main()
