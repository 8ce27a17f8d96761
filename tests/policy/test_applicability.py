"""The table of candidates and states: complete, and resting on facts that the installed engine still shows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kvassay.policy.applicability import CANDIDATES, STATES, applicability


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
