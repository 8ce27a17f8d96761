"""The project's Markdown pages, taken apart for the tests that keep them true."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = re.compile(r"^(?:\.venv(?:-vllm)?/bin/)?kvassay (?=[a-z-])")
"""How a line that runs kvassay begins."""
OPTIONAL = re.compile(r" \[[^]]*\]")
"""What a line shows as optional."""


@dataclass(frozen=True)
class Page:
    """One page."""

    path: Path

    @property
    def name(self) -> str:
        """Path from the project's root."""
        return str(self.path.relative_to(ROOT))

    @property
    def text(self) -> str:
        """All of it."""
        return self.path.read_text(encoding="utf-8")

    def blocks(self, language: str) -> list[str]:
        """Fenced blocks of a language, in order."""
        return re.findall(rf"^```{language}\n(.*?)^```", self.text, flags=re.DOTALL | re.MULTILINE)

    @property
    def commands(self) -> list[list[str]]:
        """Arguments of every kvassay command in a shell block, continuation lines joined."""
        lines = [line for block in self.blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
        found = [OPTIONAL.sub("", PROGRAM.sub("", line)) for line in lines if PROGRAM.match(line)]
        return [shlex.split(line, comments=True) for line in found]

    @property
    def targets(self) -> list[str]:
        """Make targets that a reader is told to use."""
        code = [*self.blocks("sh"), *re.findall(r"`[^`\n]+`", self.text), *re.findall(r"^    make .*", self.text, re.M)]
        return re.findall(r"\bmake ([a-z][a-z-]+)\b", "\n".join(code))

    @property
    def links(self) -> list[str]:
        """Targets of links and pictures that are not on the web, without anchors."""
        found = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", self.text)
        return [target for target in found if not target.startswith(("https://", "http://"))]


PAGES = tuple(Page(path) for path in (
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "studies").glob("*/README.md")),
))  # fmt: skip
