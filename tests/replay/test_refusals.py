"""What the closed loop refuses before it replays anything."""

from __future__ import annotations

import pytest

from kvassay.errors import ExperimentError
from kvassay.policy.budget import Protection
from kvassay.policy.registry import make
from kvassay.replay.arms import Arm
from kvassay.replay.closed import replay_trace
from kvassay.trace.reader import Trace
from kvassay.trace.schema import Subset

from .worlds import World

DENSE = [Arm(make("dense"), None, Protection())]


def of(trace: Trace, **identity: str) -> Trace:
    """The same trace as if another model or tokenizer had made it."""
    model = trace.header.model.model_copy(update=identity)
    return Trace(trace.path, trace.header.model_copy(update={"model": model}), trace.digest)


def test_a_trace_of_other_weights(llama: World) -> None:
    with pytest.raises(ExperimentError, match=r"from tiny-llama-2 \(weights f{12}\), not from tiny-llama-2 \(2"):
        replay_trace(llama.loaded, of(llama.trace, weights_sha256="f" * 64), DENSE)


def test_a_trace_of_another_tokenizer(llama: World) -> None:
    with pytest.raises(ExperimentError, match=r"token ids are of tokenizer f{12}, tiny-llama-2 comes with 1{12}"):
        replay_trace(llama.loaded, of(llama.trace, tokenizer_sha256="f" * 64), DENSE)


def test_no_dense_arm(llama: World) -> None:
    with pytest.raises(ExperimentError, match="needs the arm 'dense'"):
        replay_trace(llama.loaded, llama.trace, [Arm(make("dense"), None, Protection(), again=True)])


def test_a_trace_of_a_part_of_the_model(llama: World) -> None:
    part = Subset(layers=tuple(range(len(llama.trace.layout.layers))), kv_heads=(0,))
    narrow = Trace(llama.trace.path, llama.trace.header.model_copy(update={"subset": part}), llama.trace.digest)
    with pytest.raises(ExperimentError, match="holds a part of the model; the closed loop needs the whole"):
        replay_trace(llama.loaded, narrow, DENSE)
