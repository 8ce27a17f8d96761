"""Which came first, by git: the gate or the results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvassay.experiment.folder import CELLS
from kvassay.experiment.provenance import git


class Order(NamedTuple):
    """What git says, and why on one line. `unknown`: at least one of the two is not in git."""

    state: Literal["before", "not_before", "unknown"]
    reason: str


def file_commit(file: Path) -> str | None:
    """The commit that last changed a file, if the file is tracked and lies there as committed."""
    folder, name = file.resolve().parent, file.name
    if git(folder, "ls-files", "--error-unmatch", "--", name) is None or git(
        folder, "status", "--porcelain", "--", name
    ):
        return None
    return git(folder, "log", "-1", "--format=%H", "--", name) or None


def git_order(gate: Path, run: Path, manifest: Mapping[str, Any]) -> Order:
    """Whether the gate's commit lies before the run: before the commit that brought its cells, and not after the run's.

    The run's commit is that of the code which computed it; it counts where that code is in the gate's repository.
    """
    declared = file_commit(gate)
    if declared is None:
        return Order("unknown", f"{gate.name} is not committed as it is: the log alone says when it was declared")
    folder = gate.resolve().parent
    code = (manifest.get("commit") or {}).get("commit")
    known = code is not None and git(folder, "cat-file", "-e", f"{code}^{{commit}}") is not None
    if known and not _ancestor(folder, declared, str(code)):
        return Order("not_before", f"its commit {declared[:10]} is no ancestor of the run's commit {str(code)[:10]}")
    brought = _brought(folder, run)
    if brought is not None and (brought == declared or not _ancestor(folder, declared, brought)):
        return Order("not_before", f"its commit {declared[:10]} does not lie before {brought[:10]}, the cells' own")
    if known or brought is not None:
        return Order("before", f"its commit {declared[:10]} lies before the run")
    return Order("unknown", "the run is in no commit that git knows here: the log alone says what came first")


def _ancestor(folder: Path, first: str, second: str) -> bool:
    return git(folder, "merge-base", "--is-ancestor", first, second) is not None


def _brought(folder: Path, run: Path) -> str | None:
    """The first commit of the gate's repository that holds the run's cells."""
    top = git(folder, "rev-parse", "--show-toplevel")
    if top is None or not run.resolve().is_relative_to(Path(top).resolve()):
        return None
    found = git(folder, "log", "--diff-filter=A", "--format=%H", "--", str(run.resolve() / CELLS))
    return found.splitlines()[-1] if found else None
