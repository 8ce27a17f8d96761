"""The tiny random models of `tests/families/models.py`, and one saved as a folder with a tokenizer."""

from __future__ import annotations

from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tests.families.models import LATENT, PLAIN, SPARSE, build, config_of, token_ids

SELECTING = {**LATENT, **SPARSE}
"""Families that need more than keys, values and queries to be replayed."""

__all__ = ["PLAIN", "SELECTING", "build", "config_of", "save", "token_ids"]


def save(folder: Path, family: str = "llama", native: int = 4096) -> Path:
    """A model folder whose tokenizer has one token per byte: enough for any workload."""
    build(family, native=native).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
