"""Which code computed a cell: a hash over the source that the computation can reach, and nothing else.

The files are found by following imports from the replay and from the arms' policies, so a changed report,
command or comment invalidates nothing, and a changed cache, kernel or policy does.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from kvassay.policy.base import Policy

PACKAGE = "kvassay"
REPLAY = "kvassay.replay.closed"
TWINS = "kvassay.policy.twins"
RECORDER = ("kvassay.record.transformers", "kvassay.record.capture", "kvassay.record.calling", "kvassay.record.taps")
OUTSIDE = (
    "kvassay",
    "kvassay.errors",
    "kvassay.runtime",
    "kvassay.layout.registry",
    "kvassay.layout.registry.rows",
    "kvassay.policy.registry",
    "kvassay.policy.describe",
    "kvassay.record.hashing",
    "kvassay.record.models",
    "kvassay.record.quiet",
)
"""Reached, but they only resolve names, list models, silence logs or word errors."""
NOT_CELLS = ("kvassay.experiment", "kvassay.report", "kvassay.gate", "kvassay.cli")


def replay_code(policies: Iterable[Policy], entries: Iterable[str] = (REPLAY,)) -> str:
    """sha256 of the code that replays these policies from the modules `entries`, plug-in files included."""
    return code_sha256(closure({*entries, *(root for policy in policies for root in _roots(policy))}))


def policy_code(policy: Policy) -> str:
    """sha256 of the files that define this policy, plug-in files included, and not of what they import."""
    return code_sha256(_roots(policy) - {Policy.__module__})


def _roots(policy: Policy) -> set[str]:
    """Modules of a policy's classes."""
    kinds = [kind for part in {policy, *policy.parts} for kind in type(part).__mro__]
    roots = {kind.__module__ for kind in kinds if kind.__module__ != "builtins"}
    return roots | {TWINS} if "~" in policy.card.name else roots


def recorder_code() -> str:
    """sha256 of the recorder's own files, so that a corrected recorder does not reuse what it got wrong."""
    return code_sha256(RECORDER)


def code_sha256(modules: Iterable[str]) -> str:
    """sha256 over the modules' syntax trees, in name order: comments, docstrings and layout do not count.

    Another Python version may give another hash, since the tree's text form belongs to it.
    """
    digest = hashlib.sha256()
    for name in sorted(set(modules)):
        file = source_file(name)
        if file is not None:
            # A plug-in is the same code wherever its file lies.
            shown = name if name.split(".")[0] == PACKAGE else file.name
            digest.update(f"{shown}\0{_meaning(file.read_text(encoding='utf-8'))}\0".encode())
    return digest.hexdigest()


def closure(roots: Iterable[str]) -> frozenset[str]:
    """Every module of the package, and every root outside it, that the roots import, directly or not."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in found or name in OUTSIDE or name.startswith(NOT_CELLS) or source_file(name) is None:
            continue
        found.add(name)
        waiting.extend(_imports(name))
    return frozenset(found)


@cache
def source_file(name: str) -> Path | None:
    """The source file of a module, also one imported from a plain file; None if there is none of ours."""
    module = sys.modules.get(name)
    origin = getattr(module, "__file__", None)
    if origin is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ModuleNotFoundError, ValueError):
            return None
        origin = spec.origin if spec is not None else None
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _imports(name: str) -> Iterator[str]:
    """Modules of the package that a module imports anywhere but under TYPE_CHECKING."""
    file = source_file(name)
    tree = ast.parse(file.read_text(encoding="utf-8")) if file is not None else ast.Module([], [])
    for node in _running_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _running_nodes(child)


def _meaning(source: str) -> str:
    """The syntax tree as text, without docstrings and positions."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body: Sequence[ast.stmt] | None = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [statement for statement in body if not _is_text(statement)]
            body[:] = kept or [ast.Pass()]
    return ast.dump(tree)


def _is_text(statement: ast.stmt) -> bool:
    """A bare string: a docstring, or the note under a field."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
