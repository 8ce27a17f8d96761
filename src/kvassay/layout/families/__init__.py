"""The registry of model types whose cache layout is known, with one reader each.

Facts are those of the configuration and model classes of transformers 5.24 and of vLLM 0.32.
"""

from __future__ import annotations

from kvassay.layout.families import dense, gemma, latent, sliding, sparse
from kvassay.layout.families.base import Family

READERS: dict[str, Family] = {
    **dense.FAMILIES,
    **gemma.FAMILIES,
    **sliding.FAMILIES,
    **latent.FAMILIES,
    **sparse.FAMILIES,
}

WRAPPERS: dict[str, str | None] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "step3p7": "step3p5",
    "mistral3": None,
}
"""Multimodal types whose text model sits under `text_config`, and its type where the file omits it."""

__all__ = ["READERS", "WRAPPERS", "Family"]
