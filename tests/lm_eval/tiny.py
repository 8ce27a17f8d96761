"""A tiny model folder that the harness can use, and a local task of each kind for it."""

from __future__ import annotations

import json
from pathlib import Path

import transformers

from tests.record.tiny import save

WORDS = ("copper", "willow", "harbour", "lantern", "meadow", "quarry", "saffron", "thimble")

CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{passage}}}} Question: which word?"
doc_to_choice: ["{{{{first}}}}", "{{{{second}}}}"]
doc_to_target: 0
metric_list: [{{metric: acc}}]
metadata: {{version: 1.0}}
"""
REPLY = """
task: tiny_reply
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{passage}}}} Question: which word?"
doc_to_target: "{{{{first}}}}"
generation_kwargs: {{until: ["e"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
metadata: {{version: 1.0}}
"""


def save_model(folder: Path) -> Path:
    """A llama of random weights whose tokenizer has one token per byte, and an end token that no text holds."""
    save(folder, native=1024)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(255)
    tokenizer.save_pretrained(folder)
    return folder


def write_tasks(folder: Path) -> Path:
    """The tasks as the harness takes them: YAML beside the data."""
    folder.mkdir()
    data = folder / "test.jsonl"
    rows = []
    for at in range(3):
        passage = ", ".join(WORDS[(at + step) % len(WORDS)] for step in range(8 + at))
        rows.append({"passage": passage, "first": f" {WORDS[at]}", "second": f" {WORDS[at + 3]}s"})
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, text in (("choice", CHOICE), ("reply", REPLY)):
        (folder / f"{name}.yaml").write_text(text.format(data=data), encoding="utf-8")
    return folder
