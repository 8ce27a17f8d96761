"""The table of candidates and states: complete, and resting on facts that the installed engine still shows."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvassay.cli.applicability import applicability as command
from kvassay.layout.config import from_config
from kvassay.layout.model import Rope
from kvassay.policy.acting import refusal
from kvassay.policy.applicability import CANDIDATES, STATES, applicability, judged, state_of
from kvassay.policy.registry import get, make


def test_every_candidate_answers_for_every_state_with_a_reason() -> None:
    found = applicability()
    assert set(found) == set(CANDIDATES) == {"locks", "rdkv", "epikv", "selkv", "dynacalkv", "kara"}
    for row in found.values():
        assert list(row) == list(STATES)
        assert all(cell.reason and cell.answer in ("applicable", "redundant", "blocked") for cell in row.values())


def test_locks_is_redundant_where_an_index_selects_and_not_on_dense_mla() -> None:
    locks = applicability()["locks"]
    assert [locks[state].answer for state in ("mla", "mla_index", "v4", "block_sparse")] == [
        "applicable",
        "redundant",
        "redundant",
        "redundant",
    ]


def test_no_decision_per_token_applies_to_pooled_entries() -> None:
    assert {name: row["v4"].answer for name, row in applicability().items()} == {
        "locks": "redundant",
        "rdkv": "blocked",
        "epikv": "blocked",
        "selkv": "blocked",
        "dynacalkv": "redundant",
        "kara": "blocked",
    }


class TestAnyPolicy:
    @pytest.mark.parametrize("state", ["mla", "mla_index"])
    def test_candidates_answer_from_the_table(self, state: str) -> None:
        for name in ("locks", "rdkv", "selkv", "dynacalkv", "kara", "epikv"):
            assert judged(get(name).card, state) is applicability()[name][state]

    @pytest.mark.parametrize(
        ("name", "mla", "mla_index"),
        [
            ("snapkv", "applicable", "applicable"),
            ("fp8", "applicable", "applicable"),
            ("quest", "applicable", "redundant"),
            ("svd", "redundant", "redundant"),
            ("adakv-snapkv", "redundant", "redundant"),
            ("nearest-merge", "blocked", "blocked"),
            ("kivi", "blocked", "blocked"),
            ("think", "blocked", "blocked"),
            ("kvpress", "blocked", "blocked"),
        ],
    )
    def test_others_by_their_card(self, name: str, mla: str, mla_index: str) -> None:
        card = get(name).card
        found = judged(card, "mla"), judged(card, "mla_index")
        assert tuple(cell.answer for cell in found) == (mla, mla_index)
        assert judged(card, "gqa").answer == "applicable" and all(cell.reason for cell in found)

    def test_the_command_shows_what_a_run_goes_by(self) -> None:
        shown = CliRunner().invoke(command, ["quest", "fp8", "--json"])
        found = json.loads(shown.output)
        assert {name: {state: cell["answer"] for state, cell in row.items()} for name, row in found.items()} == {
            "quest": {
                "gqa": "applicable",
                "sliding": "redundant",
                "mla": "applicable",
                "mla_index": "redundant",
                "v4": "blocked",
                "block_sparse": "redundant",
            },
            "fp8": {
                "gqa": "applicable",
                "sliding": "redundant",
                "mla": "applicable",
                "mla_index": "applicable",
                "v4": "blocked",
                "block_sparse": "applicable",
            },
        }

    def test_a_layer_is_of_the_state_its_parts_make(self) -> None:
        states = {
            name: [state_of(layer) for layer in from_config(name).layers]
            for name in ("mistral-small-4", "glm-5.2", "gemma-3-270m", "minimax-m3", "deepseek-v4-flash")
        }
        assert set(states["mistral-small-4"]) == {"mla"} and set(states["glm-5.2"]) == {"mla_index"}
        assert set(states["gemma-3-270m"]) == {"sliding", "gqa"}
        assert states["minimax-m3"][:4] == ["gqa", "gqa", "gqa", "block_sparse"]
        assert "v4" in states["deepseek-v4-flash"]

    def test_a_rotation_that_cannot_be_taken_back_is_a_reason(self) -> None:
        plain = from_config("smollm2-135m")
        scaled = Rope(1e4, 64, "yarn", (("factor", 32.0), ("original_max_position_embeddings", 4096)))
        layout = replace(plain, layers=tuple(replace(layer, rope=scaled) for layer in plain.layers))
        policy = make("expected-attention")
        assert refusal(policy, plain) is None and refusal(make("snapkv"), layout) is None
        assert refusal(policy, layout) == (
            "blocked: RoPE kind 'yarn' also scales keys by 1.347, which is not taken back here (30 of 30 layers, full)"
        )


def engine() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.mark.vllm
class TestEngineFacts:
    def test_the_gqa_path_has_no_low_rank_projection(self) -> None:
        """Full projections of keys and values in the plain path; latents belong to MLA's own layer."""
        text = (engine() / "model_executor/layers/attention/attention.py").read_text()
        assert "kv_lora_rank" not in text.split("class MLAAttention")[0]
        llama = (engine() / "model_executor/models/llama.py").read_text()
        assert "QKVParallelLinear" in llama and "lora_rank" not in llama

    def test_the_block_table_is_passed_whole(self) -> None:
        text = (engine() / "v1/attention/backends/flash_attn.py").read_text()
        assert "block_table = attn_metadata.block_table" in text

    def test_blocks_are_nulled_or_freed_whole(self) -> None:
        text = (engine() / "v1/core/single_type_kv_cache_manager.py").read_text()
        assert "blocks[i] = self._null_block" in text and "num_skipped_tokens // self.block_size" in text

    def test_minimax_m3_selects_blocks(self) -> None:
        text = (engine() / "models/minimax_m3/common/sparse_attention.py").read_text()
        assert "topk" in text and "block_table" in text
