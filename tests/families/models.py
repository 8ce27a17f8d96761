"""A tiny random model of every family, by seed: the classes of transformers, a few layers, 64 wide.

Every parameter is drawn anew: the library's own initialisation makes attention near uniform, norms ones and sinks
zero, so that a scale, a norm or a sink left out would not show.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

S, F = "sliding_attention", "full_attention"
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
M3 = "minimax_m3_sparse"

BASE: Mapping[str, Any] = {
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
WINDOW = {"head_dim": 16, "sliding_window": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, **EXPERTS}


@dataclass(frozen=True)
class Family:
    """`config`: class of the text model's configuration; `keys`: what it differs in from `BASE`.

    drop: keys of `BASE` that the class does not take
    model: class to build where transformers' `AutoModelForCausalLM` knows none
    wrapper: configuration class that holds the text model's, where only the whole multimodal model has a head
    """

    config: str
    keys: Mapping[str, Any]
    drop: tuple[str, ...] = ()
    model: str | None = None
    wrapper: str | None = None


PLAIN: dict[str, Family] = {
    "llama": Family("LlamaConfig", {}),
    "qwen3": Family("Qwen3Config", {"head_dim": 16}),
    "mistral": Family("MistralConfig", WINDOW),
    "mistral_full": Family("MistralConfig", {"head_dim": 16, "sliding_window": None}),
    "granite": Family(
        "GraniteConfig",
        {
            "attention_multiplier": 0.11,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
    ),
    "hy_v3": Family("HYV3Config", {"head_dim": 16, "num_experts": 4, **EXPERTS}),
    "gemma2": Family("Gemma2Config", {**WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 24}),
    "gemma3": Family("Gemma3TextConfig", {**WINDOW, "layer_types": [S, S, F, S], "query_pre_attn_scalar": 24}),
    "gemma4": Family(  # the last two layers read the caches of layers 2 and 3
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
    "gemma4_k_eq_v": Family(
        "Gemma4TextConfig",
        {
            **WINDOW,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "layer_types": [S, S, S, F],
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma4_unified": Family(  # shares caches, and its K is its V
        "Gemma4UnifiedTextConfig",
        {
            **WINDOW,
            "num_hidden_layers": 6,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "layer_types": [S, F, S, F, S, F],
            "num_kv_shared_layers": 2,
            "attention_k_eq_v": True,
        },
    ),
    "gpt_oss": Family("GptOssConfig", {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "laguna": Family(
        "LagunaConfig",
        {
            **WINDOW,
            **EXPERTS,
            "layer_types": [F, S, S, S],
            "num_attention_heads_per_layer": [4, 8, 8, 8],
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "step3p7": Family(  # its text model has no class with a head of its own
        "Step3p7TextConfig",
        {
            **WINDOW,
            **ROUTED,
            "pad_token_id": 0,
            "layer_types": [F, S, S, S],
            "attention_other_setting": {"num_attention_heads": 8},
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "share_expert_dim": 32,
            "rope_theta": [5e6, 1e4, 1e4, 1e4],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0],
        },
        model="Step3p7ForConditionalGeneration",
        wrapper="Step3p7Config",
    ),
    "cohere2_moe": Family(
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
    "mimo_v2_flash": Family(
        "MiMoV2FlashConfig",
        {
            **ROUTED,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 8,
            "layer_types": [F, S, S, F],
        },
    ),
}
"""Cache plain keys and values: replayable from those and the queries."""

WRAPPED: dict[str, Family] = {
    name: Family(
        PLAIN[inner].config,
        {**PLAIN[inner].keys, "pad_token_id": 0},
        model=f"{outer}ForConditionalGeneration",
        wrapper=f"{outer}Config",
    )
    for name, inner, outer in (
        ("gemma3-multimodal", "gemma3", "Gemma3"),
        ("gemma4-multimodal", "gemma4", "Gemma4"),
        ("mistral3-multimodal", "mistral", "Mistral3"),
    )
}
"""Text models as larger checkpoints come: inside a multimodal one."""

_MLA = {
    **ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_shared_experts": 1,
}
_DSA = {
    **_MLA,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 8,  # with two, ReLU makes ties of zero scores
}

LATENT: dict[str, Family] = {
    "mistral4": Family(
        "Mistral4Config",
        {
            **_MLA,
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 1e4,
                "factor": 128.0,
                "original_max_position_embeddings": 16,
                "max_position_embeddings": 512,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        model="Mistral4ForCausalLM",
    ),
    "deepseek_v32": Family("DeepseekV32Config", _DSA),
    "glm_moe_dsa": Family("GlmMoeDsaConfig", {**_DSA, "indexer_types": ["full", "full", "shared", "shared"]}),
}
"""Cache one latent vector per token; the last two select among them by index keys."""

SPARSE: dict[str, Family] = {
    "deepseek_v4": Family(
        "DeepseekV4Config",
        {
            **ROUTED,
            "num_hidden_layers": 6,
            "head_dim": 32,
            "q_lora_rank": 32,
            "partial_rotary_factor": 0.25,
            "layer_types": [S, HCA, CSA, S, CSA, HCA],
            "compress_rates": {CSA: 4, HCA: 8},
            "num_hash_layers": 1,
            "hc_mult": 2,
            "sliding_window": 8,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_n_heads": 8,  # as for DSA
            "index_head_dim": 16,
            "index_topk": 3,
        },
        drop=("intermediate_size", "num_key_value_heads"),
    ),
    "minimax_m3": Family(
        "MiniMaxM3VLTextConfig",
        {
            "head_dim": 16,
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            "layer_types": [F, M3, M3, M3],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 4,
            "index_topk_blocks": 3,
            "index_local_blocks": 1,
        },
    ),
}
"""Compressed entries beside a window, or keys and values of which index keys select blocks."""

REFUSED: dict[str, Family] = {
    "qwen3_5": Family(
        "Qwen3_5TextConfig",
        {
            "head_dim": 16,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "kimi_linear": Family(
        "KimiLinearConfig",
        {
            **EXPERTS,
            "num_key_value_heads": 4,
            "kv_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "num_local_experts": 4,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "num_hidden_layers": 5,
        },
    ),
    "nemotron_h": Family(
        "NemotronHConfig",
        {
            **ROUTED,
            "layers_block_type": ["linear_attention", "moe", F, "mlp"],
            "head_dim": 16,
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
            "moe_shared_expert_intermediate_size": 32,
            "use_mamba_kernels": False,
        },
        drop=("num_hidden_layers",),
    ),
    "inkling": Family(
        "InklingTextConfig",
        {
            **ROUTED,
            "head_dim": 16,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 16,
            "sliding_window_size": 8,
            "d_rel": 8,
            "rel_extent": 16,
            "log_scaling_n_floor": 8,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "n_shared_experts": 1,
        },
    ),
    "lfm2": Family("Lfm2Config", {"layer_types": ["conv", F, "conv", F], "block_auto_adjust_ff_dim": False}),
}
"""Keep recurrent or convolutional state beside their keys and values."""

ADMITTED = {**PLAIN, **LATENT, **SPARSE}
ALL = {**ADMITTED, **WRAPPED, **REFUSED}

VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 28,
    "patch_size": 14,
}
"""The smallest tower a wrapper takes; no image is ever shown."""


def config_of(family: str, **changes: Any) -> Any:
    """The tiny configuration of a family, with changed keys of the text model."""
    found = ALL[family]
    keys = {**BASE, **copy.deepcopy(dict(found.keys)), **changes}
    for key in found.drop:
        keys.pop(key, None)
    if found.wrapper is None:
        return getattr(transformers, found.config)(**keys)
    return getattr(transformers, found.wrapper)(text_config=keys, vision_config=dict(VISION))


def build(family: str, attention: str = "eager", seed: int = 1, native: int = 512, **changes: Any) -> Any:
    """A tiny random float32 model in evaluation mode."""
    config = config_of(family, **changes)
    config.get_text_config().max_position_embeddings = native
    name = ALL[family].model
    make = transformers.AutoModelForCausalLM.from_config if name is None else getattr(transformers, name)._from_config
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # some classes draw their sinks
        model = make(config, attn_implementation=attention).eval().float()
    draw(model, torch.Generator().manual_seed(seed))
    return model


def draw(model: Any, generator: torch.Generator) -> None:
    """Draw every parameter anew: rows of matrices with unit norm in the mean, vectors moved by 0.3."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * (1.0 if "position_bias" in name else parameter.shape[-1] ** -0.5))
            else:
                parameter.copy_(torch.nan_to_num(parameter, neginf=0.0) + 0.3 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # which experts a token id is sent to, all of them the first until drawn
                buffer.copy_(_experts(buffer, generator))


def _experts(buffer: Tensor, generator: torch.Generator) -> Tensor:
    return torch.stack([torch.randperm(4, generator=generator)[: buffer.shape[1]] for _ in buffer])


def token_ids(count: int, seed: int = 7) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 256, (count,), generator=generator).tolist()
