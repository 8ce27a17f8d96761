"""Raw configurations of published models, reduced to the keys a layout depends on, spelt as their files spell them."""

from __future__ import annotations

from typing import Any

S, F = "sliding_attention", "full_attention"
Config = dict[str, Any]

LLAMA_31_8B: Config = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "vocab_size": 128_256,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}

NEMO_12B: Config = {
    "model_type": "mistral",
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": None,
    "max_position_embeddings": 131_072,
    "vocab_size": 131_072,
    "rope_theta": 1_000_000.0,
}

QWEN3_8B: Config = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 36,
    "max_position_embeddings": 40_960,
    "vocab_size": 151_936,
    "rope_theta": 1_000_000,
}

GRANITE_3B: Config = {
    "model_type": "granite",
    "num_hidden_layers": 40,
    "hidden_size": 2560,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "attention_multiplier": 0.015625,
    "max_position_embeddings": 131_072,
    "vocab_size": 100_352,
    "rope_theta": 10_000_000.0,
}

HY3: Config = {
    "model_type": "hy_v3",
    "num_hidden_layers": 80,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 262_144,
    "vocab_size": 120_832,
    "rope_parameters": {"rope_theta": 11_158_840.0, "rope_type": "default"},
}

GEMMA2_2B: Config = {
    "model_type": "gemma2",
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
    "vocab_size": 256_000,
    "rope_theta": 10_000.0,
}

# The published file of the 12B leaves heads' dimension, vocabulary and context to the class.
GEMMA3_12B: Config = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27},
}

GEMMA3_27B: Config = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}

_GEMMA4_ROPE = {
    F: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    S: {"rope_type": "default", "rope_theta": 10_000.0},
}


def gemma4(layers: int, pattern: int, **keys: Any) -> Config:
    """A Gemma 4 file: every `pattern`-th layer is full."""
    types = [F if (index + 1) % pattern == 0 else S for index in range(layers)]
    text = {
        "model_type": "gemma4_text",
        "num_hidden_layers": layers,
        "layer_types": types,
        "head_dim": 256,
        "global_head_dim": 512,
        "vocab_size": 262_144,
        "rope_parameters": _GEMMA4_ROPE,
        **keys,
    }
    return {"model_type": "gemma4", "text_config": text}


GEMMA4_E2B = gemma4(
    35,
    5,
    hidden_size=1536,
    num_attention_heads=8,
    num_key_value_heads=1,
    sliding_window=512,
    num_kv_shared_layers=20,
    attention_k_eq_v=False,
    max_position_embeddings=131_072,
)
GEMMA4_E4B = gemma4(
    42,
    6,
    hidden_size=2560,
    num_attention_heads=8,
    num_key_value_heads=2,
    sliding_window=512,
    num_kv_shared_layers=18,
    attention_k_eq_v=False,
    max_position_embeddings=131_072,
)
GEMMA4_26B = gemma4(
    30,
    6,
    hidden_size=2816,
    num_attention_heads=16,
    num_key_value_heads=8,
    num_global_key_value_heads=2,
    sliding_window=1024,
    attention_k_eq_v=True,
    use_bidirectional_attention="vision",
    max_position_embeddings=262_144,
)
GEMMA4_31B = gemma4(
    60,
    6,
    hidden_size=5376,
    num_attention_heads=32,
    num_key_value_heads=16,
    num_global_key_value_heads=4,
    sliding_window=1024,
    attention_k_eq_v=True,
    max_position_embeddings=262_144,
)
_12B = gemma4(
    48,
    6,
    hidden_size=3840,
    num_attention_heads=16,
    num_key_value_heads=8,
    num_global_key_value_heads=1,
    sliding_window=1024,
    attention_k_eq_v=True,
    max_position_embeddings=262_144,
)
GEMMA4_12B: Config = {
    "model_type": "gemma4_unified",
    "text_config": {**_12B["text_config"], "model_type": "gemma4_unified_text"},
}

GPT_OSS_20B: Config = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": [S, F] * 12,
    "max_position_embeddings": 131_072,
    "vocab_size": 201_088,
    "rope_theta": 150_000,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
}

LAGUNA_S: Config = {
    "model_type": "laguna",
    "num_hidden_layers": 48,
    "hidden_size": 3072,
    "num_attention_heads": 48,
    "num_attention_heads_per_layer": [48, 72, 72, 72] * 12,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": 512,
    "layer_types": [F, S, S, S] * 12,
    "max_position_embeddings": 262_144,
    "vocab_size": 100_352,
    "rope_parameters": {
        F: {
            "rope_theta": 500_000.0,
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 8192,
            "attention_factor": 1.3465735902799727,
            "partial_rotary_factor": 0.5,
        },
        S: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
    },
}

# 45 layers, every per-layer list padded to 48 with the three multi-token-prediction layers.
STEP_37: Config = {
    "model_type": "step3p7",
    "text_config": {
        "model_type": "step3p5",
        "num_hidden_layers": 45,
        "num_nextn_predict_layers": 3,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_attention_groups": 8,
        "head_dim": 128,
        "sliding_window": 512,
        "layer_types": [F, S, S, S] * 11 + [F] + [S] * 3,
        "attention_other_setting": {
            "attention_type": S,
            "num_attention_heads": 96,
            "num_attention_groups": 8,
            "head_dim": 128,
        },
        "rope_theta": ([5_000_000.0, 10_000.0, 10_000.0, 10_000.0] * 12)[:45] + [10_000.0] * 3,
        "partial_rotary_factors": ([0.5, 1.0, 1.0, 1.0] * 12)[:45] + [1.0] * 3,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
            "original_max_position_embeddings": 131_072,
        },
        "max_position_embeddings": 262_144,
        "vocab_size": 128_896,
    },
}

NORTH: Config = {
    "model_type": "cohere2_moe",
    "num_hidden_layers": 49,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "first_k_dense_replace": 1,
    "prefix_dense_sliding_window_pattern": 1,
    "max_position_embeddings": 500_000,
    "vocab_size": 262_144,
    "rope_theta": 50_000,
}

MIMO_FLASH: Config = {
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 48,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "hybrid_layer_pattern": [0 if index in (0, 5, 11, 17, 23, 29, 35, 41, 47) else 1 for index in range(48)],
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_value_scale": 0.707,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5_000_000,
    "swa_rope_theta": 10_000,
    "max_position_embeddings": 262_144,
    "vocab_size": 152_576,
}

MIMO_25: Config = {
    **MIMO_FLASH,
    "model_type": "mimo_v2",
    "rope_theta": 10_000_000,
    "max_position_embeddings": 1_048_576,
}

MISTRAL_SMALL_4: Config = {
    "model_type": "mistral3",
    "text_config": {
        "model_type": "mistral4",
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "rope_parameters": {
            "type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "max_position_embeddings": 1_048_576,
        "vocab_size": 131_072,
    },
}

DEEPSEEK_V32: Config = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "rope_theta": 10_000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "max_position_embeddings": 163_840,
    "vocab_size": 129_280,
}

GLM_52: Config = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "rope_parameters": {"rope_theta": 8_000_000.0, "rope_type": "default"},
    "max_position_embeddings": 1_048_576,
    "vocab_size": 154_880,
}

V4_FLASH: Config = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "num_nextn_predict_layers": 1,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
    "compress_rope_theta": 160_000,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "sliding_window": 128,
    "rope_theta": 10_000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65_536,
        "type": "yarn",
    },
    "max_position_embeddings": 1_048_576,
    "vocab_size": 129_280,
}

MINIMAX_M3: Config = {
    "model_type": "minimax_m3_vl",
    "text_config": {
        "model_type": "minimax_m3_text",
        "num_hidden_layers": 60,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rotary_dim": 64,
        "partial_rotary_factor": 0.5,
        "rope_theta": 5_000_000,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 128,
            "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16,
            "sparse_block_size": 128,
            "sparse_attention_freq": [0] * 3 + [1] * 57,
        },
        "max_position_embeddings": 1_048_576,
        "vocab_size": 200_064,
    },
}

PUBLISHED: dict[str, Config] = {
    "llama-3.1-8b": LLAMA_31_8B,
    "mistral-nemo-12b": NEMO_12B,
    "qwen3-8b": QWEN3_8B,
    "granite-4.1-3b": GRANITE_3B,
    "hy3": HY3,
    "gemma-2-2b": GEMMA2_2B,
    "gemma-3-12b": GEMMA3_12B,
    "gemma-3-27b": GEMMA3_27B,
    "gemma-4-e2b": GEMMA4_E2B,
    "gemma-4-e4b": GEMMA4_E4B,
    "gemma-4-12b": GEMMA4_12B,
    "gemma-4-26b-a4b": GEMMA4_26B,
    "gemma-4-31b": GEMMA4_31B,
    "gpt-oss-20b": GPT_OSS_20B,
    "laguna-s-2.1": LAGUNA_S,
    "step-3.7-flash": STEP_37,
    "north-mini-code-1.0": NORTH,
    "mimo-v2-flash": MIMO_FLASH,
    "mimo-v2.5": MIMO_25,
    "mistral-small-4": MISTRAL_SMALL_4,
    "deepseek-v3.2": DEEPSEEK_V32,
    "glm-5.2": GLM_52,
    "deepseek-v4-flash": V4_FLASH,
    "minimax-m3": MINIMAX_M3,
}
