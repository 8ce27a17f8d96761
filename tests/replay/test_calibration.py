"""Offline policies are fitted on other text: on what they are shown, once each, and never on the test's own."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch

from kvassay.errors import EvidenceMissing, PolicyError
from kvassay.policy.base import Artefact, Calibration
from kvassay.policy.budget import Protection
from kvassay.policy.epikv_calibrated import EpiKVCalibrated
from kvassay.policy.registry import make
from kvassay.replay.arms import Arm
from kvassay.replay.calibration import SHARED_RUN, TraceCalibration, check_disjoint, fit_offline
from kvassay.trace.reader import Trace
from tests.replay.watch import Watch
from tests.replay.worlds import World, sample
from tests.replay.worlds import make as make_world

ARMS = [Arm(make(name), None, Protection(0, 0)) for name in ("dense", "svd")]


def with_shared(world: World, at: int, count: int, name: str) -> Trace:
    """A calibration trace with `count` tokens of the test's, from position `at` of its context and first branch."""
    own = sample(200, 7)
    test = sample(world.trace.prefix.tokens, 0)
    stolen = (test.context_ids + test.branches[0].token_ids)[at : at + count]
    ids = own.context_ids[:50] + stolen + own.context_ids[50:]
    return world.record(name, dataclasses.replace(own, context_ids=ids))


def test_without_a_calibration_an_offline_policy_is_refused_before_anything_runs(llama: World, watch: Watch) -> None:
    with pytest.raises(PolicyError, match="svd: learns offline, so a calibration trace of other text is needed"):
        watch.run(llama, ARMS)
    assert not hasattr(watch, "replay")
    assert fit_offline([make("dense")], llama.trace, None) == {}


def test_text_that_is_not_disjoint_is_refused(llama: World) -> None:
    with pytest.raises(PolicyError, match="both hold the text of 'needle_multikey', seed 0, index 0"):
        check_disjoint(llama.trace, llama.trace)
    context = llama.trace.prefix.tokens
    for number, at in enumerate((0, 131, context - SHARED_RUN, context - 50)):
        shared = with_shared(llama, at, SHARED_RUN, f"shared-{number}")
        with pytest.raises(PolicyError, match=rf"tokens {at} to {at + SHARED_RUN - 1} of the test are in it") as caught:
            check_disjoint(llama.trace, shared)
        assert "\n" not in str(caught.value)
        with pytest.raises(PolicyError, match=rf"tokens {at} to"):
            fit_offline([make("svd")], llama.trace, shared)
    check_disjoint(llama.trace, with_shared(llama, 131, SHARED_RUN - 1, "nearly"))
    check_disjoint(llama.trace, llama.calibration)


def test_a_trace_of_another_model_is_refused(llama: World, gemma: World) -> None:
    with pytest.raises(PolicyError, match=r"it is of tiny-llama-2 .*, not of tiny-gemma3-2"):
        check_disjoint(with_other_weights(gemma.trace), llama.calibration)


def with_other_weights(trace: Trace) -> Trace:
    """The same trace under other weights."""
    model = trace.header.model.model_copy(update={"weights_sha256": "f" * 64})
    return Trace(trace.path, trace.header.model_copy(update={"model": model}), trace.digest)


def test_it_shows_the_recorded_context_of_each_layer_in_scope(gemma: World) -> None:
    policy = make("svd")
    source = TraceCalibration(gemma.calibration, policy)
    ids = gemma.calibration.prefix.token_ids.to(torch.int32).numpy().astype("<i4")
    assert source.sha256 == hashlib.sha256(ids.tobytes()).hexdigest()
    shown = dict(source.layers())
    assert list(shown) == [1, 4]
    for index, layer in shown.items():
        assert torch.equal(layer.keys, gemma.calibration.prefix.k(index).transpose(0, 1))
        assert torch.equal(layer.values, gemma.calibration.prefix.v(index).transpose(0, 1))
        assert layer.positions.tolist() == [list(range(200))] * 2
        with pytest.raises(EvidenceMissing, match="touched queries"):
            layer.queries(4)


def test_each_policy_is_fitted_once(llama: World, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = [make("svd"), make("svd"), make("svd", rank=0.25)]
    fits: list[float] = []
    fit = type(policies[0]).fit
    monkeypatch.setattr(type(policies[0]), "fit", lambda self, source: (fits.append(self.rank), fit(self, source))[1])
    found = fit_offline(policies, llama.trace, llama.calibration)
    assert fits == [0.5, 0.25] and set(found) == {"svd", "svd(rank=0.25)"}
    assert found["svd"].tensors["layer0.key.0"].shape == (32, 16)
    assert found["svd(rank=0.25)"].source_sha256 == TraceCalibration(llama.calibration, policies[0]).sha256


def test_a_twin_is_fitted_with_its_original(llama: World, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = [make("epikv~shuffled"), make("epikv"), make("epikv~shuffled", stride=8)]
    fits: list[int] = []

    def fit(self: EpiKVCalibrated, source: Calibration) -> Artefact:
        fits.append(self.stride)
        return Artefact({}, source.sha256)

    monkeypatch.setattr(EpiKVCalibrated, "fit", fit)
    found = fit_offline(policies, llama.trace, llama.calibration)
    assert fits == [16, 8]
    assert found["epikv"] is found["epikv~shuffled"] and "epikv~shuffled(stride=8)" in found


def test_an_original_is_not_fitted_by_its_twin(llama: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin has another score; what is learnt with it is the original's, whichever comes first."""

    def fit(self: EpiKVCalibrated, source: Calibration) -> Artefact:
        return Artefact({"twin": torch.tensor("~" in self.card.name)}, source.sha256)

    monkeypatch.setattr(EpiKVCalibrated, "fit", fit)
    for names in (["epikv~shuffled", "epikv"], ["epikv", "epikv~shuffled"]):
        found = fit_offline([make(name) for name in names], llama.trace, llama.calibration)
        assert [bool(found[name].tensors["twin"]) for name in names] == [False, False]


def test_a_short_calibration_may_not_be_a_piece_of_the_test(tmp_path: Path) -> None:
    world = make_world(tmp_path, "llama", 100)
    piece = dataclasses.replace(sample(40, 8), context_ids=sample(100, 0).context_ids[30:70])
    with pytest.raises(PolicyError, match="tokens 30 to 69 of the test are in it"):
        check_disjoint(world.trace, world.record("piece", piece))
