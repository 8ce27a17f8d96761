"""What offline policies have learnt, kept in the run folder: a later instalment or a second process reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import filelock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvassay.experiment.folder import RunFolder, os_errors
from kvassay.policy.base import Artefact
from kvassay.replay.calibration import FitKey, Fits

SOURCE = "source_sha256"


class KeptFits(Fits):
    """Artefacts of one run folder, a safetensors file each, for one state of the code.

    A process that needs what another is fitting waits for it. A damaged file is fitted again.
    """

    def __init__(self, folder: RunFolder, code: str) -> None:
        super().__init__()
        self.folder, self.code = folder, code

    def learnt(self, key: FitKey, fit: Callable[[], Artefact]) -> Artefact:
        """The artefact of a key: from memory, from disk, or fitted now; `ExperimentError` if it cannot be written."""
        return super().learnt(key, lambda: self._from_disk(key, fit))

    def _from_disk(self, key: FitKey, fit: Callable[[], Artefact]) -> Artefact:
        name = hashlib.sha256("\0".join((*key, self.code)).encode()).hexdigest()[:16]
        path = self.folder.fits / f"{name}.safetensors"
        with os_errors(path):
            path.parent.mkdir(exist_ok=True)
        with filelock.FileLock(path.with_name(f".{name}.lock")):
            found = _read(path)
            if found is None:
                found = fit()
                tensors = {name: tensor.contiguous() for name, tensor in found.tensors.items()}
                about = {SOURCE: found.source_sha256, "policy": key[0], "calibration": key[1]}
                self.folder.write(path, lambda to: save_file(tensors, to, about))
        return found


def _read(path: Path) -> Artefact | None:
    try:
        with safe_open(path, "pt") as file:
            names = file.keys()
            return Artefact({name: file.get_tensor(name) for name in names}, file.metadata()[SOURCE])
    except (OSError, SafetensorError):
        return None
