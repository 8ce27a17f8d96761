"""Tiny random models of many families, wide enough that attention is not uniform."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

S, F = "sliding_attention", "full_attention"
BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    **MOE,
}
WINDOW = {"head_dim": 16, "sliding_window": 8}

# Replayable from keys, values and queries.
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", WINDOW),
    "granite": (
        "GraniteConfig",
        {
            "attention_multiplier": 0.11,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
    ),
    "gemma2": ("Gemma2Config", {**WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3TextConfig", {**WINDOW, "layer_types": [S, S, F, S], "query_pre_attn_scalar": 24}),
    "gemma4": (
        "Gemma4TextConfig",
        {
            **WINDOW,
            "num_hidden_layers": 6,
            "global_head_dim": 32,
            "layer_types": [S, F, S, F, S, F],
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 256,
            "use_double_wide_mlp": True,
        },
    ),
    "gpt_oss": ("GptOssConfig", {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere2_moe": (
        "Cohere2MoeConfig",
        {
            **WINDOW,
            "num_hidden_layers": 5,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 64,
        },
    ),
    "laguna": (
        "LagunaConfig",
        {
            **WINDOW,
            **MOE,
            "layer_types": [F, S, S, S],
            "num_attention_heads_per_layer": [4, 8, 8, 8],
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {
            **MOE,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 8,
            "layer_types": [F, S, S, F],
            "n_routed_experts": 4,
        },
    ),
}
# Need more than that: their selection arrives as an argument, or their keys are not per token.
SELECTING: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": (
        "DeepseekV32Config",
        {
            **MLA,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "index_topk": 6,
            "index_head_dim": 16,
            "index_n_heads": 8,
        },
    ),
    "minimax_m3": (
        "MiniMaxM3VLTextConfig",
        {
            "head_dim": 16,
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            "layer_types": [F, "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 4,
            "index_topk_blocks": 3,
            "index_local_blocks": 1,
        },
    ),
    "deepseek_v4": (
        "DeepseekV4Config",
        {
            **MOE,
            "intermediate_size": None,
            "num_key_value_heads": None,
            "num_hidden_layers": 6,
            "head_dim": 32,
            "q_lora_rank": 32,
            "partial_rotary_factor": 0.25,
            "n_routed_experts": 4,
            "layer_types": [
                S,
                "heavily_compressed_attention",
                "compressed_sparse_attention",
                S,
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "num_hash_layers": 1,
            "hc_mult": 2,
            "sliding_window": 8,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 3,
        },
    ),
}


def config_of(family: str, **changes: Any) -> Any:
    """The tiny config of a family, with changed keys; a key set to None is left out."""
    name, own = {**PLAIN, **SELECTING}[family]
    keys = {**BASE, **copy.deepcopy(own), **changes}
    dropped = [key for key, value in own.items() if value is None]
    for key in dropped:
        del keys[key]
    found = getattr(transformers, name, None)
    if found is None:
        module = "minimax_m3_vl" if family == "minimax_m3" else family
        file = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
        found = getattr(file, name)
    return found(**keys)


def build(family: str, attention: str = "eager", seed: int = 1, native: int = 512, **changes: Any) -> Any:
    """A tiny random float32 model; the default 0.02 init would make attention near uniform, so widen it."""
    config = config_of(family, **changes)
    config.max_position_embeddings = native
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model = model.eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(torch.nan_to_num(parameter, neginf=0.0) + 0.3 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                rows = [torch.randperm(4, generator=generator)[: buffer.shape[1]] for _ in buffer]
                buffer.copy_(torch.stack(rows))
    return model


def save(folder: Path, family: str = "llama", native: int = 4096) -> Path:
    """A model folder whose tokenizer has one token per byte: enough for any workload."""
    build(family, native=native).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def token_ids(count: int, seed: int = 7) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 256, (count,), generator=generator).tolist()
