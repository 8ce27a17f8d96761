"""A look at a workload's text without any model: tokens are words, spaces stay with the word that follows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvassay.workload.registry import build
from kvassay.workload.sample import Branch, Sample

_PIECE = re.compile(r" ?[^\W\d]+|\d|\n| ?[^\w\n]|\s|_")


class WordTokenizer:
    """Gives each new word the next id; digits, signs and line ends are tokens of their own. Adds no BOS."""

    bos_token_id: int | None = None

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._pieces: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of the pieces of a text; there are no special tokens to add."""
        return [self._id(piece) for piece in _PIECE.findall(text)]

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """The very text."""
        return "".join(self._pieces[i] for i in token_ids)

    def _id(self, piece: str) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return self._ids[piece]


def preview(name: str, length: int, **options: Any) -> str:
    """The text of one sample of `length` word tokens: context, then each question and answer.

    Scored tokens of an answer stand in brackets. `options` go to `build`. Raises `WorkloadError` as that does.
    """
    tokenizer = WordTokenizer()
    sample = build(name, tokenizer, length, **options)
    lines = [tokenizer.decode(sample.context_ids).rstrip("\n"), "", _heading(sample)]
    for i, branch in enumerate(sample.branches):
        lines.append(f"  {i}  depth {branch.depth:.2f}  {branch.question_text!r}  ->  {_marked(tokenizer, branch)}")
    return "\n".join(lines)


def _heading(sample: Sample) -> str:
    visible = "visible to compression" if sample.query_aware else "after compression"
    return f"{len(sample.context_ids)} word tokens, {len(sample.branches)} questions ({visible}); [scored]:"


def _marked(tokenizer: WordTokenizer, branch: Branch) -> str:
    """The answer with brackets round its scored tokens, line ends spelled out."""
    text = ""
    for i, token in enumerate(branch.answer_ids):
        piece = tokenizer.decode([token])
        word = piece.lstrip(" ")
        text += piece[: len(piece) - len(word)] + (f"[{word}]" if i in branch.scored else word)
    return text.replace("][", "").replace("\n", "\\n")
