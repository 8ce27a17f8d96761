"""Low-rank projections in the closed loop: against the model with replaced weights, and the dense one encoded."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvassay.errors import EvidenceMissing, PolicyError
from kvassay.policy.base import Artefact, Calibration, Memory, Policy
from kvassay.policy.budget import Protection
from kvassay.policy.card import Effect, Evidence, Prefill
from kvassay.policy.lowrank_factors import gather
from kvassay.policy.registry import make
from kvassay.replay.arms import Arm
from kvassay.replay.calibration import TraceCalibration, fit_offline
from kvassay.replay.open import covers, open_loop
from kvassay.replay.projections import attention_of, layer_weights
from tests.replay.oracle import Oracle, turn
from tests.replay.watch import Watch
from tests.replay.worlds import HYBRID, World
from tests.replay.worlds import make as make_world

NONE = Protection(0, 0)
DENSE = Arm(make("dense"), None, NONE)
WORLDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biased": ("llama", {"attention_bias": True}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", HYBRID),
}


@pytest.fixture(scope="module", params=WORLDS)
def small(request: Any, tmp_path_factory: Any) -> World:
    """With and without bias, key norm and sliding layers; the prefill takes several chunks."""
    family, changes = WORLDS[request.param]
    return make_world(tmp_path_factory.mktemp(request.param), family, 100, **changes)


def arm(name: str, prefill: Prefill = Prefill.SHARED_DENSE, **parameters: Any) -> Arm:
    return Arm(make(name, **parameters), None, NONE, prefill=prefill)


def projectors(world: World, artefact: Artefact) -> dict[int, tuple[Tensor, Tensor]]:
    """Per layer, the float64 projection of key outputs and of value outputs, [dims, dims], heads in order."""
    found = {}
    for index in {int(name.split(".")[0].removeprefix("layer")) for name in artefact.tensors}:
        labels = artefact.tensors[f"layer{index}.groups"].tolist()
        dim = world.trace.layout.layers[index].kv.k_dim
        key = torch.zeros(len(labels) * dim, len(labels) * dim, dtype=torch.float64)
        for number in set(labels):
            rows = [h * dim + c for h, mine in enumerate(labels) if mine == number for c in range(dim)]
            onto = artefact.tensors[f"layer{index}.key.{number}"].double()
            key[torch.tensor(rows)[:, None], torch.tensor(rows)] = onto @ onto.T
        value = artefact.tensors[f"layer{index}.value"].double()
        found[index] = key, value @ value.T
    return found


def with_replaced_weights(world: World, artefact: Artefact) -> Any:
    """The model in float64 whose key and value weights are the thin ones multiplied out."""
    model = copy.deepcopy(world.exact)
    with torch.no_grad():
        for index, (key, value) in projectors(world, artefact).items():
            attention = model.base_model.layers[index].self_attn
            attention.k_proj.weight.copy_(key @ attention.k_proj.weight)
            attention.v_proj.weight.copy_(value @ attention.v_proj.weight)
    return model


def answers(model: Any, world: World, index: int) -> Tensor:
    """Logits of a branch's answer, teacher-forced, by the model's own attention in one pass."""
    branch, context = world.trace.branches[index], world.trace.prefix.token_ids.tolist()
    ids = torch.tensor([context + branch.token_ids.tolist()])
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits[len(context) + branch.question_tokens - 1 : -1]


def encoded_by_hand(world: World, artefact: Artefact) -> Oracle:
    """The dense context in float64, its keys and values rebuilt from coefficients before norm and rotation."""
    oracle, hooks = Oracle(world), []
    outputs: dict[tuple[int, str], Tensor] = {}
    for layer in world.exact.base_model.layers:
        attention = layer.self_attn
        for name in ("k_proj", "v_proj"):
            keep = partial(_keep, outputs, (attention.layer_idx, name))
            hooks.append(getattr(attention, name).register_forward_hook(keep))
    with torch.no_grad():
        world.exact(input_ids=world.trace.prefix.token_ids[None].long(), use_cache=False)
    for hook in hooks:
        hook.remove()
    for index, (key, value) in projectors(world, artefact).items():
        attention, layer = world.exact.base_model.layers[index].self_attn, world.trace.layout.layers[index]
        rebuilt = []
        for name, onto in (("k_proj", key), ("v_proj", value)):
            bias = getattr(attention, name).bias
            bias = torch.zeros(1).double() if bias is None else bias.detach()
            rows = (outputs[index, name] - bias) @ onto.T + bias
            rebuilt.append(rows.unflatten(1, (layer.kv.kv_heads, -1)).transpose(0, 1))
        k, v = rebuilt
        if layer.qk_norm:
            with torch.no_grad():
                k = attention.k_norm(k)
        assert layer.rope is not None
        oracle.k[index], oracle.v[index] = turn(k, torch.arange(k.shape[1]), layer.rope.theta, 1), v
    return oracle


def _keep(outputs: dict[tuple[int, str], Tensor], where: tuple[int, str], _: Any, __: Any, output: Tensor) -> None:
    outputs[where] = output[0]


def test_full_rank_is_dense_to_rounding(small: World, watch: Watch) -> None:
    arms = [DENSE]
    for prefill in Prefill:
        arms += [arm("recalkv", prefill, rank=1.0, group=1), arm("dynacalkv", prefill, rank=1.0)]
        arms += [arm("dynacalkv", prefill, rank=1.0, group=2, penalty=1e9)]  # where an unused rank costs all
    watch.run(small, arms, calibration=small.calibration)
    for index, _ in enumerate(small.trace.branches):
        for one in arms[1:]:
            dense, own = watch.logits["dense", index], watch.logits[one.label, index]
            torch.testing.assert_close(own, dense, rtol=0, atol=2e-4, msg=one.label)
    assert len(watch.logits) == 7 * len(small.trace.branches)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("recalkv", {"group": 2}), ("dynacalkv", {"group": 1}), ("dynacalkv", {"ceiling": "elements", "whitened": False})],
)
def test_truncated_ranks_are_those_of_the_replaced_projections(
    small: World, watch: Watch, name: str, parameters: dict[str, Any]
) -> None:
    shared = arm(name, rank=0.4, **parameters)
    own = dataclasses.replace(shared, prefill=Prefill.OWN)
    rows = watch.run(small, [DENSE, shared, own], calibration=small.calibration)
    artefact = fit_offline([shared.policy], small.trace, small.calibration, small.loaded.model)[shared.policy.label]
    replaced = with_replaced_weights(small, artefact)
    for index, branch in enumerate(small.trace.branches):
        found = [watch.logits[label, index].double() for label in ("dense", shared.label, own.label)]
        torch.testing.assert_close(found[2], answers(replaced, small, index), rtol=0, atol=1e-3)
        torch.testing.assert_close(found[1], encoded_by_hand(small, artefact).answer(branch), rtol=0, atol=1e-3)
        torch.testing.assert_close(found[0], answers(small.exact, small, index), rtol=0, atol=1e-3)
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert float((found[one] - found[other]).abs().max()) > 0.05
    assert all(row.facts for row in rows if row.arm != "dense")


def test_what_is_cached_are_the_ranks(small: World, watch: Watch) -> None:
    """Coefficients at 2 bytes; equal elements for both groupings, fewer under the published ceiling."""
    parameters: dict[str, Any] = {"rank": 0.5, "group": 1, "multiple": 4}
    arms = [DENSE, arm("recalkv", **parameters), arm("dynacalkv", ceiling="elements", **parameters)]
    arms.append(arm("dynacalkv", **parameters))
    held: dict[str, float] = {}

    def each(lane: Any) -> None:
        layers = [s for layer in lane.scope for s in lane.cache.ledger.segments(lane.seq, layer)]
        held[lane.arm.label] = sum(segment.nbytes for segment in layers)

    watch.each = each
    watch.run(small, arms, calibration=small.calibration)
    artefacts = fit_offline([one.policy for one in arms], small.trace, small.calibration, small.loaded.model)
    for one in arms[1:]:
        tensors = artefacts[one.policy.label].tensors
        ranks = sum(t.shape[1] for name, t in tensors.items() if ".key." in name or name.endswith(".value"))
        assert held[one.label] == 100 * ranks * 2
    recal, equal, published = (held[one.label] for one in arms[1:])
    assert equal == recal
    assert published <= recal


def test_fisher_gradients_and_moments_are_those_of_the_model(small: World) -> None:
    """By plain autograd on the float64 model, per piece of text."""
    policy = make("dynacalkv")
    source = TraceCalibration(small.calibration, policy, small.loaded.model)
    before = {name: parameter.requires_grad for name, parameter in small.loaded.model.named_parameters()}
    found = gather(source, samples=3, tokens=60)
    model, ids = copy.deepcopy(small.exact), small.calibration.prefix.token_ids.long()
    squares: dict[tuple[int, str], Tensor] = {}
    for piece in (ids[:60], ids[60:120], ids[120:180]):
        model.zero_grad()
        logits = model(input_ids=piece[None], use_cache=False).logits[0]
        picked = logits[:-1].log_softmax(-1).gather(1, piece[1:, None])
        (-picked.mean()).backward()
        for index in found:
            for name in ("k_proj", "v_proj"):
                square = getattr(model.base_model.layers[index].self_attn, name).weight.grad.square() / 3
                squares[index, name] = squares.get((index, name), torch.zeros(())) + square
    for index, stats in found.items():
        for mine, name in zip(stats.fisher, ("k_proj", "v_proj"), strict=True):
            assert mine == pytest.approx(float(squares[index, name].sqrt().mean()), rel=1e-4)
    assert all(parameter.grad is None for parameter in small.loaded.model.parameters())
    assert {name: p.requires_grad for name, p in small.loaded.model.named_parameters()} == before
    # One piece that is all of the text: its inputs are what was recorded.
    whole = gather(source, samples=1, tokens=200)
    for index, stats in whole.items():
        x = small.calibration.prefix.tap(f"layer_input_{index:03d}").double()
        centred = x - x.mean(0)
        torch.testing.assert_close(stats.moment, x.T @ x, rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(stats.gram, centred.T @ centred, rtol=1e-3, atol=1e-2)
    # A text shorter than a piece is one piece.
    assert [len(p.inputs[index]) for p in source.passes(4, 500)] == [200]


@dataclass(frozen=True)
class Nosy(Policy):
    """Reads weights that its card does not declare."""

    card = dataclasses.replace(make("svd").card, name="nosy", effects=frozenset({Effect.NONE}))

    def fit(self, source: Calibration) -> Artefact:
        source.weights()
        return Artefact({})


def test_weights_are_shown_to_who_declares_them_and_where_there_is_a_model(small: World) -> None:
    with pytest.raises(EvidenceMissing, match="policy 'nosy' touched the model's weights without declaring it"):
        fit_offline([Nosy()], small.trace, small.calibration, small.loaded.model)
    with pytest.raises(PolicyError, match="'dynacalkv' learns from the model's weights, and this replay has no model"):
        fit_offline([make("dynacalkv")], small.trace, small.calibration)
    assert covers(make("dynacalkv"), calibrated=True) == "learns from the model's weights, which takes the model"
    with pytest.raises(PolicyError, match="cannot run in the open loop: its policy learns from the model's weights"):
        open_loop(small.trace, [DENSE, arm("recalkv")], calibration=small.calibration)
    without = type(
        "Q",
        (type(make("svd")),),
        {"card": dataclasses.replace(make("svd").card, evidence=frozenset({Evidence.WEIGHTS}))},
    )
    passes = TraceCalibration(small.calibration, without(), small.loaded.model).passes(1, 50)
    assert next(iter(passes)).gradients == {}


def test_output_projections_are_those_of_the_layers_in_scope(small: World) -> None:
    with pytest.raises(EvidenceMissing, match="policy 'snapkv' touched the model's weights without declaring it"):
        TraceCalibration(small.calibration, make("snapkv"), small.loaded.model).outputs()
    found = TraceCalibration(small.calibration, make("kvpress-critical"), small.loaded.model).outputs()
    assert set(found) == {layer.index for layer in small.trace.layout.layers if layer.kind == "full"}
    for index, projection in found.items():
        module = small.loaded.model.base_model.layers[index].self_attn.o_proj
        assert torch.equal(projection.weight, module.weight)
        out, heads = module.weight.shape
        assert projection.weight.shape == (out, heads) and heads % small.trace.layout.layers[index].q_heads == 0


def test_it_must_be_fitted_and_see_every_input(small: World, watch: Watch) -> None:
    with pytest.raises(PolicyError, match="nothing was fitted for layer"):
        make("dynacalkv").project(small.trace.layout.layers[-2], Memory())
    held = [tap for tap in small.trace.header.taps if tap.kind != "layer_input"]
    bare = dataclasses.replace(
        small, trace=type(small.trace)(small.trace.path, small.trace.header.model_copy(update={"taps": held}), "other")
    )
    arms = [DENSE, arm("dynacalkv")]
    if any(layer.qk_norm for layer in small.trace.layout.layers):
        with pytest.raises(EvidenceMissing, match="record with --tap layer_input"):
            watch.run(bare, arms, calibration=small.calibration)
    else:
        assert len(watch.run(bare, arms, calibration=small.calibration)) == 4


def test_projections_that_are_none_are_refused(small: World) -> None:
    layer = small.trace.layout.layers[0]
    with pytest.raises(PolicyError, match="un-normalised values"):
        attention_of(small.loaded.model, dataclasses.replace(layer, v_norm=True))
    fused = copy.deepcopy(small.loaded.model)
    del fused.base_model.layers[0].self_attn.k_proj
    with pytest.raises(PolicyError, match="has no linear k_proj and v_proj"):
        attention_of(fused, layer)


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm(16), torch.nn.RMSNorm(32)])
def test_a_key_norm_of_another_kind_is_refused(tmp_path: Path, norm: torch.nn.Module) -> None:
    world = make_world(tmp_path, "qwen3", 70)
    model = copy.deepcopy(world.loaded.model)
    model.base_model.layers[0].self_attn.k_norm = norm
    with pytest.raises(PolicyError, match="the key norm of layer 0 is not an RMS norm over its 16 head dimensions"):
        layer_weights(model, world.trace.layout.layers[0])
