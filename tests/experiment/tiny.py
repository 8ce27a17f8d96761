"""A tiny random model with a tokenizer of bytes, saved as a folder, and an experiment on it."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EXPERIMENT = """
[experiment]
name = "tiny"
models = ["{model}"]
seed = 3

[[workload]]
name = "kv_short"
length = 384
contexts = {contexts}
questions = 2
params = {{ pairs = 4, size = 2 }}

[arms]
policies = ["knorm"]
budgets = ["keep=0.5"]

[protection]
sink = 2
recent = 8

[protocol]
free_tokens = 3

[record]
prefill_chunk = 128

[latency]
enabled = false
"""


def save_tiny_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def write_experiment(folder: Path, model: Path, contexts: int = 3) -> Path:
    file = folder / "tiny.toml"
    file.write_text(EXPERIMENT.format(model=model, contexts=contexts), encoding="utf-8")
    return file
