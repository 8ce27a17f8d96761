"""EpiKV's calibration: occlusion against plain passes in float64, correlations by hand, the rule at its layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvassay.errors import EvidenceMissing, PolicyError
from kvassay.policy.base import Artefact, Memory
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.epikv_calibrated import correlations, importance
from kvassay.policy.registry import make
from kvassay.policy.weights import Occlusions
from kvassay.replay.arms import Arm
from kvassay.replay.calibration import TraceCalibration, fit_offline
from kvassay.replay.open import covers
from tests.replay.watch import Watch
from tests.replay.worlds import World

NONE = Protection(0, 0)
POLICY = make("epikv", reading="generated", window=5, tokens=90, piece=8, stride=4)


def test_occlusions_are_those_of_the_model_with_pieces_blanked(llama: World) -> None:
    found = TraceCalibration(llama.calibration, POLICY, llama.loaded.model).occlusions(90, 8, 4)
    text, branch = llama.calibration.prefix.token_ids.long()[-90:], llama.calibration.branches[0]
    ids = torch.cat([text, branch.token_ids.long()])

    def loss(tokens: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
        with torch.no_grad():
            out = llama.exact(input_ids=tokens[None], use_cache=False, output_hidden_states=True)
        picked = out.logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None])
        return -float(picked[len(text) + branch.question_tokens - 1 :].mean()), out.hidden_states

    whole, hidden = loss(ids)
    assert found.starts.tolist() == list(range(0, 83, 4)) and found.width == 8
    for start, change in zip(found.starts.tolist(), found.change.tolist(), strict=True):
        blanked = ids.clone()
        blanked[start : start + 8] = 0  # the tiny model names neither padding nor end of text
        assert change == pytest.approx(loss(blanked)[0] - whole, abs=1e-4)
    assert sorted(found.hidden) == [0, 1, 2, 3]
    for layer in (0, 1, 2):  # the library's last one is normalised
        torch.testing.assert_close(found.hidden[layer].double(), hidden[layer + 1][0, :90], rtol=1e-3, atol=1e-3)


def test_importance_and_correlations_by_hand() -> None:
    """Pieces of 4, every 2nd: a token takes the larger rise of its two; layer 1 moves with it, layer 0 against it."""
    change = torch.tensor([0.125, 0.5, -0.25, 0.25])  # exact, so that ties stay ties
    starts = torch.tensor([0, 2, 4, 6])
    found = Occlusions(starts, 4, change, {})
    wanted = importance(found, 11)
    assert wanted[:10].tolist() == [0.125] * 2 + [0.5] * 4 + [0.25] * 4
    assert bool(wanted[10].isnan())
    steps = torch.nan_to_num(wanted).float()
    up, down = steps.cumsum(0)[:, None], (1 - steps).cumsum(0)[:, None]
    rho = correlations(dataclasses.replace(found, hidden={0: down, 1: up}), window=1)
    assert rho.tolist() == pytest.approx([-1, 1])
    # Over two tokens the change lags; ranks by hand for layer 1: means of neighbours from the third token on.
    means = torch.stack([steps[2:10], steps[1:9]]).mean(0)
    means = torch.cat([steps[1:2], means])
    ranks = [torch.tensor([float((x < y).sum() + ((x == y).sum() - 1) / 2) for y in x]) for x in (means, wanted[1:10])]
    by_hand = torch.corrcoef(torch.stack(ranks))[0, 1]
    assert correlations(dataclasses.replace(found, hidden={0: up}), window=2)[0] == pytest.approx(
        float(by_hand), abs=1e-6
    )


def test_it_is_the_rule_at_the_layers_found(llama: World, watch: Watch) -> None:
    fitted = fit_offline([POLICY], llama.trace, llama.calibration, llama.loaded.model)[POLICY.label].tensors
    early, late = int(fitted["early"]), int(fitted["late"])
    assert fitted["rho"].shape == (4,) and early == int(fitted["rho"].argmax()) and late == int(fitted["rho"].argmin())
    plain = make("epikv-uncal", reading="generated", window=5, early=float(early), late=float(late))
    if 0 in (early, late):  # below 1 it would be a fraction of the depth
        plain = make("epikv-uncal", reading="generated", window=5, early=max(early, 1e-9), late=max(late, 1e-9))
    budget = Budget("keep_tokens", 12)
    arms = [Arm(make("dense"), None, NONE), Arm(POLICY, budget, NONE), Arm(plain, budget, NONE)]
    watch.run(llama, arms, calibration=llama.calibration)
    for index in range(len(llama.trace.branches)):
        mine, theirs = (watch.logits[arm.label, index] for arm in arms[1:])
        assert torch.equal(mine, theirs)
    assert float((watch.logits[arms[1].label, 0] - watch.logits["dense", 0]).abs().max()) > 1e-3


def test_what_it_cannot_be_fitted_on_is_refused(llama: World) -> None:
    with pytest.raises(PolicyError, match="this replay has no model"):
        fit_offline([POLICY], llama.trace, llama.calibration)
    with pytest.raises(PolicyError, match="200 tokens and 2 questions; a question and a piece of 300 tokens"):
        TraceCalibration(llama.calibration, POLICY, llama.loaded.model).occlusions(500, 300, 4)
    with pytest.raises(EvidenceMissing, match="touched the model's occlusion without declaring it"):
        TraceCalibration(llama.calibration, make("dynacalkv"), llama.loaded.model).occlusions(90, 8, 4)
    with pytest.raises(PolicyError, match="has no artefact"):
        POLICY.columns(Memory())  # type: ignore[attr-defined]
    assert POLICY.columns(Memory(artefact=Artefact({"early": torch.tensor(3), "late": torch.tensor(1)}))) == (3, 1)  # type: ignore[attr-defined]
    still = Occlusions(torch.tensor([0]), 4, torch.zeros(1), {0: torch.zeros(9, 2), 1: torch.zeros(9, 2)})
    source = type("Still", (), {"occlusions": lambda self, *_: still, "sha256": ""})()
    with pytest.raises(PolicyError, match="blanking pieces of the text changes nothing"):
        POLICY.fit(source)
    assert "decides over all layers again" in str(covers(POLICY, calibrated=True))
