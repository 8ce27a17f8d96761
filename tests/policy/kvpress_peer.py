"""kvpress in a real model, for `test_kvpress_real.py`; runs in kvpress's own environment, knows nothing of kvassay.

    python kvpress_peer.py JOB.json RESULT.safetensors

Prefills the job's tokens, catches what each named layer's attention was given, and lets every press compress that
layer's cache with the model's own module. Result per layer: k, v, rotated q, output weights, one kept mask per case,
and the channels that ThinK leaves. Nothing is shared with the helper under test.
"""

import json
import sys
from pathlib import Path

import kvpress
import torch
from kvpress.utils import get_prerope_query_states
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import rotate_half
from transformers.utils import logging


def caught(model, ids, layers):
    """Keyword arguments and output of each layer's attention, and the cache."""
    seen, cache = {}, DynamicCache()
    hooks = [
        model.model.layers[i].self_attn.register_forward_hook(
            lambda module, args, kwargs, out, i=i: seen.update({i: (dict(kwargs), out[1])}), with_kwargs=True
        )
        for i in layers
    ]
    model.model(torch.tensor([ids]), past_key_values=cache)
    for hook in hooks:
        hook.remove()
    return seen, cache


def rotary_of(model):
    """As kvpress gives it to a module; Gemma 3's takes the layer's kind besides."""
    rotary = model.model.rotary_emb
    if model.config.model_type.startswith("gemma3"):
        return lambda x, position_ids: rotary(x, position_ids, "full_attention")
    return rotary


def made(case, tokens):
    if "prune" in case:
        return kvpress.ThinKPress(key_channel_compression_ratio=case["prune"])
    press = None
    for name in reversed(case["press"]):
        kind, options = getattr(kvpress, name), case["options"].get(name, {})
        if press is None:
            press = kind(compression_ratio=1 - (case["keep"] + 1e-9) / tokens, **options)
        else:
            press = kind(press=press, **options)
    return press


def kept(press, seed, module, hidden, k, v, attentions, kwargs):
    """bool [kv_heads, tokens], by looking every surviving row up."""
    module.masked_key_indices = None
    torch.manual_seed(seed)
    new, _ = press.compress(module, hidden, k.clone(), v.clone(), attentions, kwargs)
    mask = torch.zeros(k.shape[1:3], dtype=torch.bool)
    if module.masked_key_indices is not None:
        _, heads, gone = module.masked_key_indices
        mask[:] = True
        mask[heads, gone] = False
        module.masked_key_indices = None
        return mask
    for head in range(k.shape[1]):
        where = {row.numpy().tobytes(): at for at, row in enumerate(k[0, head])}
        mask[head, [where[row.numpy().tobytes()] for row in new[0, head]]] = True
    return mask


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    result = {"num_layers": torch.tensor(0)}
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="eager").eval()
    result["num_layers"] += model.config.num_hidden_layers
    with torch.inference_mode():
        seen, cache = caught(model, job["ids"], job["layers"])
        for i in job["layers"]:
            module, (kwargs, maps) = model.model.layers[i].self_attn, seen[i]
            module.rotary_emb = rotary_of(model)
            k, v, hidden = cache.layers[i].keys, cache.layers[i].values, kwargs["hidden_states"]
            q = get_prerope_query_states(module, hidden)
            cos, sin = (side[:, None] for side in kwargs["position_embeddings"])
            q = q * cos + rotate_half(q) * sin
            result |= {f"{i}/k": k[0], f"{i}/v": v[0], f"{i}/q": q[0], f"{i}/output": module.o_proj.weight.data}
            for number, case in enumerate(job["cases"]):
                press = made(case, len(job["ids"]))
                if "prune" in case:
                    pruned, _ = press.compress(module, hidden, k.clone(), v, None, kwargs)
                    result[f"{i}/channels"] = (pruned[0] != 0).any(1)
                    continue
                observed = "ObservedAttentionPress" in case["press"]
                module.config._attn_implementation = "eager" if observed else "sdpa"
                result[f"{i}/kept{number}"] = kept(
                    press, job["seed"], module, hidden, k, v, maps if observed else None, kwargs
                )
    save_file({name: t.contiguous() for name, t in result.items()}, sys.argv[2])


if __name__ == "__main__":
    main()
