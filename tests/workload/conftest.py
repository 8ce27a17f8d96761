from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from kvassay.workload import haystack

CHAT = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def train(bos: bool, chat: str | None = None) -> Any:
    """A byte-level BPE of 1500 tokens trained on the haystack; with `bos` it puts <bos> in front."""
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    special = ["<bos>", "<|turn|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=special, initial_alphabet=alphabet)
    text = [paragraph for _, paragraphs in haystack.load().documents[:40] for paragraph in paragraphs]
    core.train_from_iterator(text, trainer)
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>")
    made.chat_template = chat
    return made


@pytest.fixture(scope="session")
def plain() -> Any:
    return train(bos=False)


@pytest.fixture(scope="session")
def with_bos() -> Any:
    return train(bos=True, chat=CHAT)
