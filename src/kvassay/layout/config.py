"""From a model configuration to a `Layout`: a dict, a config object, a file, a folder, or a registry id.

Raw files are read by their own keys, without importing the model library: a class's defaults are not the
checkpoint's values, and what a class would derive is derived by the readers in `layout/families`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvassay.errors import LayoutError, UnsupportedModel, did_you_mean
from kvassay.layout.families import READERS, WRAPPERS
from kvassay.layout.families.base import check_overrides
from kvassay.layout.model import Layer, Layout
from kvassay.layout.raw import Raw
from kvassay.layout.refusals import refuse_state
from kvassay.layout.registry import rows

CONFIG_FILE = "config.json"


def from_config(source: object, kv_dtype: str = "bfloat16") -> Layout:
    """Return the cache layout of a model.

    Args:
        source: a raw configuration dict; an object with `to_dict()`; the path of a `config.json` or of a
            folder holding one; the id of a registry row, which a file or folder of that name does not
            hide unless written as a path (`./hy3`); or a Hugging Face id whose configuration is in the
            local cache (nothing is downloaded).
        kv_dtype: dtype at which unencoded cache elements are counted.

    Raises:
        UnsupportedModel: the model keeps recurrent or convolutional state, or its type is unknown.
        LayoutError: the source cannot be found or read, or a key is missing, wrong or contradicts another.
    """
    data, name = load(source)
    raw = text_model(data, name)
    family = READERS[raw.model_type]
    check_overrides(raw, family.per_layer)
    raw = raw.with_defaults(family.defaults)
    layers, context = family.read(raw), raw.integer("max_position_embeddings")
    _check_windows(raw, layers, context)
    row = rows.find(source)
    return Layout(
        model_type=raw.model_type,
        layers=layers,
        hidden_size=raw.integer("hidden_size"),
        vocab_size=raw.integer("vocab_size"),
        native_context=row.context.native if row else context,
        kv_dtype=kv_dtype,
    )


def _check_windows(raw: Raw, layers: Sequence[Layer], context: int) -> None:
    for layer in layers:
        if layer.window is not None and layer.window > context:
            raise raw.error(
                f"layer {layer.index} has a window of {layer.window} tokens, more than the context of {context} "
                "(key 'max_position_embeddings')"
            )


def load(source: object) -> tuple[Mapping[str, Any], str]:
    """Return the raw configuration behind `source` and the name errors should give it."""
    if isinstance(source, Mapping):
        return source, "configuration"
    to_dict = getattr(source, "to_dict", None)
    if callable(to_dict):
        return to_dict(), type(source).__name__
    if not isinstance(source, str | Path):
        raise LayoutError(
            f"a configuration must be a dict, an object with to_dict(), a path or a name, not {type(source).__name__}"
        )
    if row := rows.find(source):
        return row.config, row.id
    path = find(source)
    return read_json(path), str(path)


def find(source: str | Path) -> Path:
    """Return the configuration file at a path or in a folder (`~` is the home), or of a cached Hugging Face id."""
    path = Path(source).expanduser()
    if path.is_dir():
        path = path / CONFIG_FILE
        if not path.is_file():
            raise LayoutError(f"{path.parent}: no {CONFIG_FILE} in this folder")
    if path.is_file():
        return path
    found = cached(str(source))
    if found is not None:
        return found
    raise LayoutError(f"{source}: no such file, folder or cached model{_how_to_get(str(source))}")


def cached(repo: str) -> Path | None:
    """Return the configuration file of a Hugging Face id in the local cache, if it is there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repo, CONFIG_FILE)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _how_to_get(name: str) -> str:
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith(".json"):
        known = rows.of_repo(name)
        listed = f" (the registry has its layout: {known.id})" if known else ""
        return f"; to have it cached: hf download {name} {CONFIG_FILE}{listed}"
    return did_you_mean(name, rows.ids())


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; `LayoutError` names the file and the place of a mistake."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise LayoutError(f"{path}: not valid JSON: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise LayoutError(f"{path}: cannot be read: {error}") from error
    if not isinstance(data, Mapping):
        raise LayoutError(f"{path}: holds a JSON {type(data).__name__}, not an object")
    return data


def text_model(data: Mapping[str, Any], name: str) -> Raw:
    """Return the view of the text model's keys, refusing what is unknown or keeps other state.

    Keys of a wrapper (a multimodal configuration) are checked as well as those under its `text_config`.
    """
    outer = _model_type(data, name)
    nested = data.get("text_config")
    if not isinstance(nested, Mapping):
        inner = WRAPPERS.get(outer) or outer
        return _admitted(data, name, outer, inner)
    own = {key: value for key, value in data.items() if not isinstance(value, Mapping)}
    inner = str(nested.get("model_type") or WRAPPERS.get(outer) or "")
    refuse_state(nested, f"{name}: text_config", inner or outer)
    refuse_state(own, name, outer)
    if outer not in WRAPPERS and outer not in READERS:
        raise _unknown(name, outer)
    if not inner:
        raise LayoutError(f"{name}: text_config: missing key 'model_type'")
    return _admitted(nested, f"{name}: text_config", inner, inner)


def _admitted(data: Mapping[str, Any], name: str, said: str, model_type: str) -> Raw:
    refuse_state(data, name, said)
    if model_type not in READERS:
        raise _unknown(name, model_type)
    return Raw(data, name, model_type)


def _model_type(data: Mapping[str, Any], name: str) -> str:
    found = data.get("model_type")
    if not isinstance(found, str) or not found:
        raise LayoutError(f"{name}: missing key 'model_type'")
    return found


def _unknown(name: str, model_type: str) -> UnsupportedModel:
    known = {*READERS, *WRAPPERS}
    return UnsupportedModel(f"{name}: unknown model type '{model_type}'{did_you_mean(model_type, known)}")
