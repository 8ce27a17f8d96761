"""Loading a model to record or replay: embedded name, local folder or Hugging Face id.

Imports torch and transformers only when called, so that the command line stays quick.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvassay.errors import ModelError, did_you_mean
from kvassay.layout.config import CONFIG_FILE, cached, from_config
from kvassay.layout.model import Layout
from kvassay.record.hashing import files_sha256, tokenizer_sha256
from kvassay.record.models import CATALOGUE, MANIFEST, is_fetched, model_dir
from kvassay.record.quiet import quiet_transformers
from kvassay.record.shards import check_shards

if TYPE_CHECKING:
    import torch

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ModelIdentity:
    """What a recording says about the model it came from.

    `source` is `embedded`, `folder` or `hub`; `weights_sha256` hashes the weight files in name order and
    `tokenizer_sha256` the tokenizer's pipeline. `revision` is the hub commit, where there is one.
    """

    name: str
    source: str
    weights_sha256: str
    tokenizer_sha256: str
    licence: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode with its tokenizer, cache layout and identity."""

    model: Any
    tokenizer: Any
    layout: Layout
    identity: ModelIdentity

    @property
    def device(self) -> torch.device:
        """The device the model's parameters are on."""
        device: torch.device = next(self.model.parameters()).device
        return device


def load(name_or_path: str | Path, device: str = "cpu", dtype: torch.dtype | str = "float32") -> LoadedModel:
    """Load an embedded model by name, a local folder, or a Hugging Face id.

    `device` is `cpu`, `cuda` or `cuda:N`. Raises `ModelError`, on one line and saying what to do, if the
    model is not fetched, cannot be had or is unknown, and `UnsupportedModel` if its cache has no layout.
    """
    where = torch_device(device)
    wanted = _torch_dtype(dtype)
    files = describe(name_or_path)
    with _reading(files.name, files.source), quiet_transformers():
        if files.source != "hub":  # the hub's client checks what it downloads
            check_shards(Path(files.place))
        model, found = _auto_class(files.config).from_pretrained(
            files.place, config=files.config, dtype=wanted, ignore_mismatched_sizes=True, output_loading_info=True
        )
    _refuse_drawn(files.name, found)
    return LoadedModel(model.eval().to(where), files.tokenizer, files.layout, files.identity())


def _auto_class(config: Any) -> Any:
    """The loader that knows this configuration: some text models exist only inside a multimodal one (Step 3.7)."""
    import transformers

    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    known = causal or type(config) not in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return transformers.AutoModelForCausalLM if known else transformers.AutoModelForImageTextToText


def _refuse_drawn(name: str, found: Mapping[str, Any]) -> None:
    """Raise `ModelError` if transformers drew weights at random because the files lack them or have another shape."""
    wrong = [f"'{key}' is {list(given)}, the model needs {list(own)}" for key, given, own in found["mismatched_keys"]]
    lacking = [f"'{key}' is missing" for key in sorted(found["missing_keys"])]
    if problems := [*sorted(wrong), *lacking]:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise ModelError(f"{name}: its weights do not fit its config: {problems[0]}{more}")


@dataclass(frozen=True)
class ModelFiles:
    """A model without its weights: enough to make its text and to know its cache."""

    name: str
    source: str
    """`embedded`, `folder` or `hub`."""
    place: str
    """What `from_pretrained` is given."""
    config: Any
    tokenizer: Any
    layout: Layout

    def identity(self) -> ModelIdentity:
        """Hash the weights, which must be here by now. `ModelError` if there are none."""
        return _identity(self.name, self.source, self.place, self.config, self.tokenizer)


def describe(name_or_path: str | Path) -> ModelFiles:
    """Read a model's config and tokenizer; raises what `load` does."""
    import transformers

    name = str(name_or_path)
    source, place = locate(name)
    with _reading(name, source), quiet_transformers():
        with _in_our_words(source, place):
            config = transformers.AutoConfig.from_pretrained(place)
            layout = from_config(config)
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    return ModelFiles(name, source, place, config, tokenizer, layout)


@contextmanager
def _reading(name: str, source: str) -> Iterator[None]:
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError, SafetensorError) as error:
        raise ModelError(_why(name, source, error)) from error


@contextmanager
def _in_our_words(source: str, place: str) -> Iterator[None]:
    """Where a configuration cannot be read, let our own reader say why: it names the file and the key."""
    try:
        yield
    except Exception:
        file = cached(place) if source == "hub" else Path(place) / CONFIG_FILE
        if file is not None:
            from_config(file)
        raise


def locate(name: str) -> tuple[str, str]:
    """The kind of source and what `from_pretrained` is to be given; `ModelError` if it cannot be there."""
    if name in CATALOGUE:
        if not is_fetched(name):
            raise ModelError(f"embedded model '{name}' is not here; run: kvassay models fetch {name}")
        return "embedded", str(model_dir(name))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / CONFIG_FILE).is_file():
            raise ModelError(f"{path}: no config.json; a model folder holds config.json, weights and tokenizer")
        return "folder", str(path)
    near = did_you_mean(name, CATALOGUE)
    if "did you mean" in near and "/" not in name:
        raise ModelError(f"no model is called '{name}'{near}")
    if not HUB_ID.fullmatch(name):
        raise ModelError(f"'{name}' is neither a folder, a Hugging Face id nor an embedded model{near}")
    return "hub", name


def torch_device(device: str) -> torch.device:
    """A device that is there; `ModelError` for another."""
    import torch

    try:
        where = torch.device(device)
    except RuntimeError:
        raise ModelError(f"device '{device}' is not one of cpu, cuda, cuda:N") from None
    if where.type not in ("cpu", "cuda"):
        raise ModelError(f"device '{device}' is not one of cpu, cuda, cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if where.type == "cuda" and (where.index or 0) >= count:
        raise ModelError(f"device '{device}' asked for, but torch {torch.__version__} sees {count} CUDA devices")
    return where


def _torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    import torch

    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"dtype '{name}' is not one of {', '.join(DTYPES)}")
    found: torch.dtype = getattr(torch, name)
    return found


def _why(name: str, source: str, error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if source == "embedded":
        return f"embedded model '{name}' cannot be read ({first}); run: kvassay models fetch --force {name}"
    if source == "folder":
        return f"{name}: cannot be loaded as a causal language model ({first})"
    return (
        f"'{name}' cannot be had from the Hugging Face hub ({first}); check the id and the network, "
        f"or give a local folder or an embedded model ({', '.join(sorted(CATALOGUE))})"
    )


def _identity(name: str, source: str, place: str, config: Any, tokenizer: Any) -> ModelIdentity:
    if source == "embedded":
        manifest = json.loads((Path(place) / MANIFEST).read_text(encoding="utf-8"))
        weights, words = manifest["weights_sha256"], manifest["tokenizer_sha256"]
        return ModelIdentity(name, source, weights, words, licence=manifest["licence"])
    revision = getattr(config, "_commit_hash", None)
    folder = Path(place) if source == "folder" else _snapshot(place, revision)
    shown = folder.resolve().name if source == "folder" else name
    return ModelIdentity(shown, source, _weights_sha256(folder), tokenizer_sha256(tokenizer), revision=revision)


def _snapshot(name: str, revision: str | None) -> Path:
    """Return the local folder into which the hub's files of `name` were just cached."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, local_files_only=True))


def _weights_sha256(folder: Path) -> str:
    """Hash the folder's weight files, in name order, as one stream; one file's hash is its own sha256."""
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        files = sorted(folder.glob(pattern))
        if files:
            return files_sha256(files)
    raise ModelError(f"{folder}: no *.safetensors or pytorch_model*.bin")
