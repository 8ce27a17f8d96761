"""Raw configurations of published models: those of the registry, and a family that has no row."""

from __future__ import annotations

from typing import Any

from kvassay.errors import UnsupportedModel
from kvassay.layout.config import from_config
from kvassay.layout.registry import rows

Config = dict[str, Any]


def raw(name: str) -> Config:
    return dict(rows.row(name).config)


def _is_admitted(name: str) -> bool:
    try:
        from_config(name)
    except UnsupportedModel:
        return False
    return True


LLAMA_31_8B = raw("llama-3.1-8b")
NEMO_12B = raw("mistral-nemo-12b")
QWEN3_8B = raw("qwen3-8b")
GRANITE_3B = raw("granite-4.1-3b")
HY3 = raw("hy3")
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
GEMMA3_12B = raw("gemma-3-12b")
GEMMA3_27B = raw("gemma-3-27b")
GEMMA4_E2B = raw("gemma-4-e2b")
GEMMA4_E4B = raw("gemma-4-e4b")
GEMMA4_12B = raw("gemma-4-12b")
GEMMA4_26B = raw("gemma-4-26b-a4b")
GEMMA4_31B = raw("gemma-4-31b")
GPT_OSS_20B = raw("gpt-oss-20b")
LAGUNA_S = raw("laguna-s-2.1")
STEP_37 = raw("step-3.7-flash")
NORTH = raw("north-mini-code-1.0")
MIMO_FLASH = raw("mimo-v2-flash")
MIMO_25 = raw("mimo-v2.5")
MISTRAL_SMALL_4 = raw("mistral-small-4")
DEEPSEEK_V32 = raw("deepseek-v3.2")
GLM_52 = raw("glm-5.2")
V4_FLASH = raw("deepseek-v4-flash")
MINIMAX_M3 = raw("minimax-m3")

ADMITTED = tuple(name for name in rows.ids() if _is_admitted(name))
REFUSED = tuple(name for name in rows.ids() if name not in ADMITTED)
PUBLISHED: dict[str, Config] = {"gemma-2-2b": GEMMA2_2B, **{name: raw(name) for name in ADMITTED}}
