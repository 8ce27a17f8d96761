"""The kvpress side of `vs_kvpress.py`; runs in kvpress's own environment and knows nothing of kvassay.

    python kvpress_peer.py JOB.json RESULT.json

Two ways to run the same grid: as kvpress is used (each cell prefills the context under its press), and a
loop that prefills once, keeps what the presses need (hidden states per layer) and compresses copies of
that cache. Both feed the continuation in one forward pass through SDPA, the fastest setting that works.
"""

import copy
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import kvpress
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

PRESSES = {
    "random": lambda r: kvpress.RandomPress(r),
    "streaming": lambda r: kvpress.StreamingLLMPress(r),
    "snapkv": lambda r: kvpress.SnapKVPress(r),
    "keydiff": lambda r: kvpress.KeyDiffPress(r),
    "tova": lambda r: kvpress.TOVAPress(r),
    "knorm": lambda r: kvpress.KnormPress(r),
}


def continuation_nll(model, cache, context, tokens):
    """Teacher-forced NLL of tokens 1.. in one forward over tokens 0..-2, true positions."""
    positions = torch.arange(context, context + len(tokens) - 1)[None]
    logits = model(torch.tensor([tokens[:-1]]), past_key_values=cache, position_ids=positions).logits[0]
    return torch.nn.functional.cross_entropy(logits.float(), torch.tensor(tokens[1:])).item()


def as_used(model, press, context, tokens):
    cache = DynamicCache()
    with press(model):
        model.model(torch.tensor([context]), past_key_values=cache)
    kept = cache
    return kept, continuation_nll(model, cache, len(context), tokens)


class SharedPrefill:
    """One dense prefill whose cache and hidden states every cell starts from."""

    def __init__(self, model, context):
        self.model, self.seen = model, {}
        hooks = [
            layer.self_attn.register_forward_pre_hook(self.keep(i), with_kwargs=True)
            for i, layer in enumerate(model.model.layers)
        ]
        self.cache = DynamicCache()
        model.model(torch.tensor([context]), past_key_values=self.cache)
        for hook in hooks:
            hook.remove()

    def keep(self, index):
        def hook(module, args, kwargs):
            self.seen[index] = dict(kwargs)

        return hook

    def cell(self, press, context, tokens):
        cache = copy.deepcopy(self.cache)
        if hasattr(press, "post_init_from_model"):
            press.post_init_from_model(self.model)
        for index, layer in enumerate(self.model.model.layers):
            kwargs, stored = self.seen[index], cache.layers[index]
            layer.self_attn.rotary_emb = self.model.model.rotary_emb
            stored.keys, stored.values = press.compress(
                layer.self_attn, kwargs["hidden_states"], stored.keys, stored.values, None, kwargs
            )
        return cache, continuation_nll(self.model, cache, len(context), tokens)


def kept_positions(full, cache):
    """Positions of surviving keys [layer][kv_head], by exact match of rows of the same run."""
    out = []
    for a, b in zip(full.layers, cache.layers, strict=True):
        heads = []
        for h in range(a.keys.shape[1]):
            have = {row.numpy().tobytes(): i for i, row in enumerate(a.keys[0, h])}
            heads.append(sorted(have[row.numpy().tobytes()] for row in b.keys[0, h, : b.kept]))
        out.append(heads)
    return out


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="sdpa").eval()
    context, tokens = job["context"], job["continuation"]
    result = {"kvpress": __import__("importlib.metadata").metadata.version("kvpress"), "cells": {}}
    result["transformers"] = transformers.__version__
    with torch.inference_mode():
        model.model(torch.tensor([context[:256]]))  # warm up
        start = time.perf_counter()
        full = DynamicCache()
        model.model(torch.tensor([context]), past_key_values=full)
        result["prefill_s"] = time.perf_counter() - start
        result["dense_nll"] = continuation_nll(model, copy.deepcopy(full), len(context), tokens)
        start = time.perf_counter()
        caches = {}
        for name in job["policies"]:
            for keep in job["budgets"]:
                cache, nll = as_used(model, PRESSES[name](1 - keep), context, tokens)
                caches[f"{name} keep={keep:g}"] = (cache, nll)
        result["as_used_s"] = time.perf_counter() - start
        start = time.perf_counter()
        shared = SharedPrefill(model, context)
        result["shared_prefill_s"] = time.perf_counter() - start
        start = time.perf_counter()
        for name in job["policies"]:
            for keep in job["budgets"]:
                _, nll = shared.cell(PRESSES[name](1 - keep), context, tokens)
                result["cells"][f"{name} keep={keep:g}"] = {"nll_shared": nll}
        result["shared_cells_s"] = time.perf_counter() - start
        for label, (cache, nll) in caches.items():
            for layer in cache.layers:
                layer.kept = layer.keys.shape[2] - (len(tokens) - 1)
            result["cells"][label].update(nll=nll, kept=kept_positions(full, cache))
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
