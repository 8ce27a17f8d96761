"""The other end of `helper.py`: starts kvpress's python, asks it, and says on one line what went wrong."""

from __future__ import annotations

import atexit
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from torch import Tensor

from kvassay.errors import PolicyError
from kvassay.policy.kvpress import helper

SETTING = "KVASSAY_KVPRESS_PYTHON"
"""Environment variable that names the python of an environment with kvpress."""
MADE_BY_MAKE = Path(".venv-kvpress/bin/python")
"""Where `make kvpress-setup` puts it; looked for under the working directory."""


class Peer:
    """One helper process. Questions hold one layer at a time, so its memory is bounded by a layer's."""

    def __init__(self, python: Path) -> None:
        """Start it and wait for its greeting; `PolicyError` if there is none."""
        self.python = python
        self._errors = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 (it lives as long as the process)
        command = [str(python), helper.__file__]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment
            )
        except OSError as error:
            raise PolicyError(f"{SETTING}: {python} cannot be run ({error.strerror}); {HOW}") from None
        self.versions, _ = self._receive()

    def ask(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The answer to one question; `PolicyError` with what the press raised, or why the process ended."""
        try:
            helper.send(cast(BinaryIO, self._process.stdin), header, tensors)
        except OSError:
            raise self._ended() from None
        reply, found = self._receive()
        if "error" in reply:
            raise PolicyError(f"kvpress: {reply['error']}")
        return found

    @property
    def running(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it, if it runs: its input ends, and so does it."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _receive(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        try:
            message = helper.receive(cast(BinaryIO, self._process.stdout))
        except ValueError as error:
            raise PolicyError(f"{self.python} answers what no kvpress helper does: {error}") from None
        if message is None:
            raise self._ended()
        return message

    def _ended(self) -> PolicyError:
        self._process.kill()
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        last = f": {said[-1][:200]}" if said else f" with status {status}"
        return PolicyError(f"kvpress's process ({self.python}) ended{last}; {HOW}")


HOW = f"make kvpress-setup makes an environment with kvpress, {SETTING} names its python"

_PEERS: dict[tuple[int, Path], Peer] = {}
"""Running helpers by process and python: one per run, and one per worker of a run."""


def peer() -> Peer:
    """This process's helper, started on first use; `PolicyError` with how to make its environment if there is none."""
    python = interpreter()
    key = os.getpid(), python
    found = _PEERS.get(key)
    if found is None or not found.running:
        found = _PEERS[key] = Peer(python)
        atexit.register(found.close)
    return found


def interpreter() -> Path:
    """The python of kvpress's environment, as set or as made by make; `PolicyError` if there is none."""
    named = os.environ.get(SETTING)
    python = Path(named).expanduser() if named else MADE_BY_MAKE
    if python.is_file():
        return python.absolute()
    where = f"{SETTING}={named} is no file" if named else f"{SETTING} is not set and there is no {MADE_BY_MAKE}"
    raise PolicyError(f"policy 'kvpress' runs kvpress in an environment of its own, but {where}; {HOW}")
