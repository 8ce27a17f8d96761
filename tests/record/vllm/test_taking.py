from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvassay.errors import RecordError
from kvassay.layout.config import from_config
from kvassay.record.vllm.capture import Ran
from kvassay.record.vllm.limits import Limits
from kvassay.record.vllm.taking import Taking
from tests.record import tiny

LAYOUT = from_config(tiny.config_of("llama"))
"""4 query heads, 2 KV heads, 16 elements each."""


def test_rows_of_the_batch_without_its_padding() -> None:
    limits = Limits(kv_heads=(1,), q_from=3, output=True, logits_k=1, logits_from=4)
    taking = Taking(LAYOUT, limits, [("a", 2), ("b", 1)])
    taking.begin(torch.tensor([7, 8, 9, 0]), torch.tensor([2, 3, 4, 0]))
    assert taking.ran == (Ran(id="a", first=2, ids=(7, 8)), Ran(id="b", first=4, ids=(9,)))
    q, k, v = torch.randn(4, 64), torch.randn(4, 32), torch.randn(4, 32)
    taking.inputs(2, q, k, v)
    taking.output(2, q + 1)
    taking.slots(0, torch.tensor([8, 9, 40, -1]))
    table = torch.randn(64, 256)
    hidden = torch.randn(4, 64)
    taking.logits(SimpleNamespace(compute_logits=lambda rows: rows @ table), hidden)
    rows = taking.rows
    assert torch.equal(rows["2.k"], k.view(4, 2, 16)[:3, [1]])
    assert torch.equal(rows["2.v"], v.view(4, 2, 16)[:3, [1]])
    assert torch.equal(rows["2.q"], q.view(4, 4, 16)[1:3, 2:])
    assert torch.equal(rows["2.output"], (q + 1).view(4, 4, 16)[1:3, 2:])
    assert rows["slots.0"].tolist() == [8, 9, 40]
    assert rows["logits.ids"].tolist() == [[int((hidden[2] @ table).argmax())]]
    k.zero_()
    assert bool(rows["2.k"].any())


def test_only_plain_text_tokens_are_taken() -> None:
    with pytest.raises(RecordError, match="recording takes text models"):
        Taking(LAYOUT, Limits(), [("a", 1)]).begin(None, torch.tensor([0]))
    with pytest.raises(RecordError, match="request a: a step computes positions that do not follow"):
        Taking(LAYOUT, Limits(), [("a", 2)]).begin(torch.tensor([1, 2]), torch.tensor([0, 2]))
