"""How text becomes token ids: special tokens, chat template, question and answer boundaries.

The rules, each checked by `checks.py` on every sample: special tokens come once and only where the tokenizer
itself puts them; the template is decided once per sample; text is always encoded without special tokens; an
answer is the true continuation of its question, so both are encoded together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvassay.errors import WorkloadError, did_you_mean

TEMPLATES = ("none", "chat")
_BODY = "KVASSAY-BODY-MARK"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the workloads use."""

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token, if there is one."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """Text of token ids."""


@dataclass(frozen=True)
class Framing:
    """What stands around the text: special tokens first, then the template's head; its tail ends a question."""

    tokenizer: Tokenizer
    template: str
    prefix_ids: tuple[int, ...]
    head: str
    tail: str
    template_sha256: str | None

    def encode(self, text: str) -> list[int]:
        """Encode text without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to the very text, special tokens spelled out, spaces untouched."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def context_ids(self, text: str) -> list[int]:
        """Ids of a context: the tokenizer's own prefix, then the text."""
        return [*self.prefix_ids, *self.encode(text)]

    def question_and_answer(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """Encode `question + answer` together and divide the ids at the boundary.

        Raises `WorkloadError` where the question's ids are not a prefix of the whole, that is, where a token
        crosses the boundary: then the answer's ids would not be what follows the question.
        """
        question_ids = self.encode(question)
        both = self.encode(question + answer)
        if both[: len(question_ids)] != question_ids:
            raise WorkloadError(
                f"a token crosses from the question {question!r} into the answer {answer!r}: "
                "move the space to the start of the answer"
            )
        return question_ids, both[len(question_ids) :]

    def provenance(self) -> dict[str, Any]:
        """Template name and hash, and the special tokens put in front."""
        return {
            "template": self.template,
            "template_sha256": self.template_sha256,
            "prefix_ids": list(self.prefix_ids),
        }


def frame(tokenizer: Tokenizer, template: str = "none") -> Framing:
    """Decide the template and the special tokens once.

    `none` gives plain completion text after what the tokenizer adds by itself; `chat` wraps the text into one
    user turn. Raises `WorkloadError` for an unknown template or a tokenizer without a chat template.
    """
    if template not in TEMPLATES:
        raise WorkloadError(f"unknown template '{template}'{did_you_mean(template, TEMPLATES)}")
    if template == "none":
        return Framing(tokenizer, template, _own_prefix(tokenizer), "", "", None)
    return _chat_frame(tokenizer)


def _own_prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special tokens that the tokenizer puts before a text, by comparing both ways of encoding."""
    plain = list(tokenizer.encode("word", add_special_tokens=False))
    full = list(tokenizer.encode("word", add_special_tokens=True))
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    raise WorkloadError("the tokenizer changes the text itself when it adds special tokens")


def _chat_frame(tokenizer: Tokenizer) -> Framing:
    source = getattr(tokenizer, "chat_template", None)
    if not source:
        raise WorkloadError("template 'chat' was asked for, but the tokenizer has no chat template (use 'none')")
    turn = [{"role": "user", "content": _BODY}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)  # type: ignore[attr-defined]
    head, mark, tail = text.partition(_BODY)
    if not mark:
        raise WorkloadError("the chat template drops or rewrites the user's text")
    bos = getattr(tokenizer, "bos_token", None)
    prefix: tuple[int, ...] = ()
    # A template that spells out BOS already has it; adding it as an id keeps it from being doubled.
    if bos and head.startswith(bos) and tokenizer.bos_token_id is not None:
        prefix, head = (tokenizer.bos_token_id,), head[len(bos) :]
    return Framing(tokenizer, "chat", prefix, head, tail, hashlib.sha256(str(source).encode()).hexdigest())
