"""Selection rules of trained indexers against the libraries' own classes, on tiny random models."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from kvassay.policy import indexers
from kvassay.policy.indexers import dsa_tokens, m3_blocks, v4_entries
from kvassay.record.calling import cache_keyword, new_cache
from tests.record import tiny

CHUNKS = (20, 27, 1, 1, 1, 1, 1)


def run(model: Any, part: str) -> tuple[dict[str, list[dict[str, Any]]], Any]:
    """Feed a prompt in chunks, then single tokens; what passed each module named `...part`, and the cache."""
    calls: dict[str, list[dict[str, Any]]] = {}

    def note(name: str) -> Any:
        def hook(module: Any, given: tuple[Any, ...], named: dict[str, Any], out: Tensor) -> None:
            calls.setdefault(name, []).append({"module": module, "given": given, **named, "out": out.clone()})

        return hook

    hooks = [
        module.register_forward_hook(note(name), with_kwargs=True)
        for name, module in model.named_modules()
        if name.endswith(part)
    ]
    cache, at = new_cache(model), 0
    ids = torch.tensor([tiny.token_ids(sum(CHUNKS))])
    with torch.no_grad():
        for count in CHUNKS:
            positions = torch.arange(at, at + count)[None]
            model(
                input_ids=ids[:, at : at + count],
                position_ids=positions,
                use_cache=True,
                **{cache_keyword(model): cache},
            )
            at += count
    for hook in hooks:
        hook.remove()
    assert calls
    return calls, cache


def argument(call: dict[str, Any], at: int, name: str) -> Any:
    return call[name] if name in call else call["given"][at]


def layer_of(name: str) -> int:
    return int(name.split("layers.")[1].split(".")[0])


def starts() -> list[int]:
    return [sum(CHUNKS[:i]) for i in range(len(CHUNKS))]


def chosen(rows: Tensor) -> list[list[int]]:
    return [sorted(x for x in row if x >= 0) for row in rows.tolist()]


def m3_index(call: dict[str, Any]) -> Tensor:
    """The index queries [heads, queries, dim] of one call, by the module's own parts."""
    module, hidden = call["module"], argument(call, 0, "hidden_states")
    cos, sin = (x[..., : module.head_dim] for x in argument(call, 1, "position_embeddings"))
    query = module.q_norm(module.q_proj(hidden).view(1, hidden.shape[1], -1, module.head_dim)).transpose(1, 2)
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb  # type: ignore[attr-defined]
    return rotate(query, query, cos, sin)[0][0].detach()


@torch.no_grad()
@pytest.mark.parametrize("local, topk", [(1, 3), (2, 3), (1, 50)])
def test_m3_blocks_are_the_librarys(local: int, topk: int) -> None:
    model = tiny.build("minimax_m3", index_local_blocks=local, index_topk_blocks=topk)
    calls, cache = run(model, "self_attn.indexer")
    assert len(calls) == 3
    for name, made in calls.items():
        keys = cache.layers[layer_of(name)].idx_keys[0, 0]
        for start, call in zip(starts(), made, strict=True):
            query = m3_index(call)
            seen = start + query.shape[1]
            positions = torch.arange(start, seen)
            mine = m3_blocks(query, keys[:seen], positions, block=4, topk=topk, local_blocks=local)
            assert mine.shape == call["out"][0].transpose(0, 1).shape
            for head in range(2):
                assert chosen(mine[:, head]) == chosen(call["out"][0, head])


def test_init_blocks_come_first_inside_the_list() -> None:
    # Vectors that make block b score b: without forcing the best are the last ones.
    key = torch.arange(20.0)[:, None] // 4
    query = torch.ones(1, 2, 1)
    rows = m3_blocks(query, key, torch.tensor([19, 5]), block=4, topk=3, init_blocks=1, local_blocks=1)
    assert chosen(rows[:, 0]) == [[0, 3, 4], [0, 1]]
    assert rows[1, 0].tolist()[2] == -1


def test_the_largest_token_stands_for_its_block() -> None:
    key = torch.tensor([[9.0], [-9.0], [5.0], [5.0], [0.0], [0.0]])  # sums 0, 10; largest 9, 5
    rows = m3_blocks(torch.ones(1, 1, 1), key, torch.tensor([5]), block=2, topk=2)
    assert chosen(rows[:, 0]) == [[0, 2]]


def test_tokens_that_a_head_no_longer_holds_do_not_score() -> None:
    key = torch.tensor([[9.0], [1.0], [5.0], [5.0], [7.0], [7.0], [0.0], [0.0]])
    alive = torch.ones(2, 8, dtype=torch.bool)
    alive[0, [0, 4, 5]] = False  # head 0: block 0 is down to 1, block 2 is gone
    rows = m3_blocks(torch.ones(2, 1, 1), key, torch.tensor([7]), block=2, topk=3, init_blocks=0, alive=alive)
    assert chosen(rows[0]) == [[0, 1, 3], [0, 2, 3]]
    alive[0, :2] = False
    rows = m3_blocks(torch.ones(2, 1, 1), key, torch.tensor([7]), block=2, topk=3, init_blocks=1, alive=alive)
    assert chosen(rows[0]) == [[1, 3], [0, 2, 3]]
    assert rows[0, 0, -1] == -1


@torch.no_grad()
def test_dsa_tokens_are_the_librarys() -> None:
    calls, cache = run(tiny.build("deepseek_v32"), "self_attn.indexer")
    for name, made in calls.items():
        keys = cache.layers[layer_of(name)].indexer_keys[0]
        for start, call in zip(starts(), made, strict=True):
            module, hidden = call["module"], argument(call, 0, "hidden_states")
            resid, (cos, sin) = argument(call, 1, "q_resid"), argument(call, 2, "position_embeddings")
            query = module.wq_b(resid).view(1, hidden.shape[1], module.n_heads, module.head_dim)
            rotated, rest = query.split([module.qk_rope_head_dim, module.head_dim - module.qk_rope_head_dim], -1)
            rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb  # type: ignore[attr-defined]
            query = torch.cat([rotate(rotated, rotated, cos, sin, unsqueeze_dim=2)[0], rest], -1)[0].transpose(0, 1)
            seen = start + hidden.shape[1]
            positions = torch.arange(start, seen)
            mine = dsa_tokens(query, keys[:seen], module.weights_proj(hidden)[0], positions, topk=module.index_topk)
            for row, theirs, at in zip(chosen(mine), call["out"][0].tolist(), positions.tolist(), strict=True):
                assert row == sorted(
                    x for x in theirs if x <= at
                )  # the library lists tokens to come where few are past


@torch.no_grad()
def test_v4_entries_are_the_librarys() -> None:
    model = tiny.build("deepseek_v4")
    calls, _ = run(model, "compressor.indexer")
    scored, _ = run(model, "compressor.indexer.scorer")
    assert len(calls) == len(scored) == 2
    for name, made in calls.items():
        for start, call, inside in zip(starts(), made, scored[f"{name}.scorer"], strict=True):
            query, key, hidden = (argument(inside, i, n) for i, n in enumerate(("q", "compressed_kv", "hidden_states")))
            weight = inside["module"].weights_proj(hidden)[0]
            positions = torch.arange(start, start + query.shape[1])
            mine = v4_entries(query[0].transpose(0, 1), key[0], weight, positions, topk=3, ratio=4)
            assert chosen(mine) == chosen(call["out"][0])


def test_queries_in_pieces_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    query, key, weight = (torch.randn(*shape, generator=rng) for shape in ((2, 30, 8), (40, 8), (30, 2)))
    at = torch.arange(10, 40)

    def all_of() -> list[Tensor]:
        return [
            m3_blocks(query, key, at, block=4, topk=3),
            dsa_tokens(query, key, weight, at, topk=5),
            v4_entries(query, key[:10], weight, at, topk=3),
        ]

    whole = all_of()
    monkeypatch.setattr(indexers, "ELEMENTS", 2 * 40 * 7)
    for mine, other in zip(all_of(), whole, strict=True):
        assert torch.equal(mine, other)
