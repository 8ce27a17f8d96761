"""A policy that acts as tokens are written: what every query reads, its own token's key among it, is what it stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvassay.policy.budget import Protection
from kvassay.policy.card import Card, Prefill
from kvassay.policy.fp8 import Fp8
from kvassay.policy.registry import make
from kvassay.record.calling import attention_through
from kvassay.replay.arms import Arm
from kvassay.replay.open import open_loop
from tests.replay.watch import Watch
from tests.replay.worlds import QUESTION, F, S, World
from tests.replay.worlds import make as make_world

BARE = Protection(0, 0)
FP8 = Arm(make("fp8"), None, BARE, prefill=Prefill.OWN)


def rounded(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def attend_rounded(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **given: Any) -> Any:
    if getattr(module, "sliding_window", None) is None:  # fp8's card leaves windows alone
        k, v = rounded(k), rounded(v)
    return sdpa_attention_forward(module, q, k, v, mask, **given)


def attend_all_rounded(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **given: Any) -> Any:
    return sdpa_attention_forward(module, q, rounded(k), rounded(v), mask, **given)


for name, attention in (("fp8_oracle", attend_rounded), ("fp8_everywhere_oracle", attend_all_rounded)):
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)


def of_model(world: World, branch: int, attention: str) -> Tensor:
    """Logits [answer, vocab] of the library's own model over context and branch at once."""
    ids = torch.cat([world.trace.prefix.token_ids, world.trace.branches[branch].token_ids]).long()
    answer = world.trace.branches[branch].tokens - QUESTION
    with torch.inference_mode(), attention_through(world.loaded.model, attention):
        return world.loaded.model(input_ids=ids[None], use_cache=False).logits[0, -answer - 1 : -1].float()


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def shallow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    """One layer that is rounded: a value that falls between two codes changes none that is rounded after it."""
    changes = {"num_hidden_layers": 2, "layer_types": [S, F]} if request.param == "gemma3" else {"num_hidden_layers": 1}
    return make_world(tmp_path_factory.mktemp(request.param), request.param, 100, **changes)


def test_fp8_is_the_model_that_rounds_what_it_attends_to(shallow: World, watch: Watch) -> None:
    watch.run(shallow, [Arm(make("dense"), None, BARE), FP8])
    for branch in range(len(shallow.trace.branches)):
        plain, wanted = (of_model(shallow, branch, name) for name in ("sdpa", "fp8_oracle"))
        torch.testing.assert_close(watch.logits["dense", branch], plain, rtol=0, atol=1e-4)
        torch.testing.assert_close(watch.logits[FP8.label, branch], wanted, rtol=0, atol=1e-4)
        assert (plain - wanted).abs().max() > 1e-2


@dataclass(frozen=True)
class Everywhere(Fp8):
    """fp8 in the windows, too."""

    card: ClassVar[Card] = replace(Fp8.card, name="fp8-everywhere", acts_on=frozenset({"full", "sliding"}))


def test_a_chunk_longer_than_a_window_is_written_in_pieces(tmp_path: Path, watch: Watch) -> None:
    """A policy is shown what the newest token can see: what had left the window by then would stay as it was."""
    world = make_world(tmp_path, "gemma3", 100, num_hidden_layers=1, layer_types=[S], sliding_window=8)
    arm = Arm(Everywhere(), None, BARE, prefill=Prefill.OWN)
    watch.run(world, [Arm(make("dense"), None, BARE), arm])
    for branch in range(len(world.trace.branches)):
        wanted = of_model(world, branch, "fp8_everywhere_oracle")
        torch.testing.assert_close(watch.logits[arm.label, branch], wanted, rtol=0, atol=1e-4)


def test_the_open_loop_reads_codes_alone(llama: World) -> None:
    """Half of dense's bytes, to the byte: recorded tokens are encoded as they are written, as the context was."""
    dense, fp8 = Arm(make("dense"), None, BARE), Arm(make("fp8"), None, BARE)
    rows = [row for row in open_loop(llama.trace, [dense, fp8]) if row.arm == "fp8"]
    assert rows and [row.read_bytes for row in rows] == pytest.approx([row.dense_bytes / 2 for row in rows], rel=1e-12)
    assert all(0 < row.output_error < 0.1 for row in rows)
