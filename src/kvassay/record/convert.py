"""GGUF to a plain Hugging Face folder: float32 safetensors, config and tokenizer.

Reading GGUF takes a minute, reading the folder a fraction of a second, so this is done once.
"""

from __future__ import annotations

import importlib.util
import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from kvassay.errors import ModelError
from kvassay.record.hashing import tokenizer_sha256
from kvassay.record.quiet import quiet_transformers

NEEDED = ("gguf", "sentencepiece", "google.protobuf", "accelerate")


def require_converter() -> None:
    """Raise `ModelError` naming the extra to install unless every library the conversion needs is there."""
    missing = [name for name in NEEDED if not _importable(name)]
    if missing:
        raise ModelError(
            f"converting needs {', '.join(missing)}, not installed here; run: pip install 'kvassay[models]'"
        )


def convert_gguf(gguf: Path, out: Path) -> str:
    """Convert `gguf` into the new folder `out`; return the tokenizer's sha256.

    The weights are dequantised to float32. Raises `ModelError` if transformers cannot read the file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with quiet_transformers(), redirect_stderr(io.StringIO()):  # the GGUF reader's own progress bar
        try:
            tokenizer = AutoTokenizer.from_pretrained(**source)
            model, loading = AutoModelForCausalLM.from_pretrained(
                **source, dtype=torch.float32, output_loading_info=True
            )
        except (OSError, ValueError, KeyError, NotImplementedError) as error:
            raise ModelError(f"{gguf.name}: transformers cannot read this GGUF file: {error}") from error
        _refuse_gaps(gguf.name, loading)
        _forget_quantizer(model)
        tokenizer.save_pretrained(out)
        model.save_pretrained(out)
    return tokenizer_sha256(tokenizer)


def _refuse_gaps(name: str, loading: dict[str, Any]) -> None:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in loading.get(kind) or ())
        if keys:
            raise ModelError(f"{name}: {len(keys)} {kind.replace('_', ' ')} on conversion, first {keys[0]}")


def _forget_quantizer(model: Any) -> None:
    """Drop the GGUF quantizer: transformers 5 refuses to save a model which still carries one."""
    for owner, name in (
        (model.config, "quantization_config"),
        (model, "hf_quantizer"),
        (model, "quantization_method"),
    ):
        if hasattr(owner, name):
            delattr(owner, name)
    model.is_quantized = False


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        return False
