"""Raw configurations of the small models the project ships with, so that they can be inspected unfetched.

Facts of the published `config.json` of HuggingFaceTB/SmolLM2-135M-Instruct and google/gemma-3-270m-it,
reduced to the keys a layout depends on.
"""

from __future__ import annotations

from typing import Any

EMBEDDED_CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 100_000.0,
        "max_position_embeddings": 8192,
        "vocab_size": 49_152,
    },
    "gemma-3-270m": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 18,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "max_position_embeddings": 32_768,
        "vocab_size": 262_144,
    },
}
