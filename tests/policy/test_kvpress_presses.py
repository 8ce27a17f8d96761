"""Every press that can be asked, through the bridge and inside the real model; the list is complete.

`make kvpress-parity` makes kvpress's environment and runs this. kvpress prefills a text in its own environment with
its own hooks; the keys, values and queries that its attention saw go through the bridge, which must keep the very same
tokens although it has no model.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kvassay.cache.data import LayerData
from kvassay.layout.model import Layer
from kvassay.policy.base import Artefact, Memory, Policy
from kvassay.policy.kvpress.critical import KvpressCritical
from kvassay.policy.kvpress.policy import Kvpress
from kvassay.policy.kvpress.presses import PRESSES, REFUSED
from kvassay.policy.think import ThinK
from kvassay.policy.views import LayerView
from kvassay.record.models import CATALOGUE, model_dir
from tests.policy.build import memory, view
from tests.policy.kvpress_cases import MARKS, NEAR, PEER, apart, context_of, full_layers

pytestmark = MARKS
TOKENS, KEEP, LAYERS, SEED = 512, 128, 2, 0


def cases() -> list[dict[str, object]]:
    """Every press, wrappers round two others; some with options."""
    found: list[dict[str, object]] = []
    for name, press in PRESSES.items():
        inner = [[one] for one in press.only or ("SnapKVPress", "KeyDiffPress")] if press.wraps else [[]]
        found += [{"press": [name, *one], "options": {}} for one in inner]
    found.append({"press": ["SnapKVPress"], "options": {"SnapKVPress": {"window_size": 16, "kernel_size": 7}}})
    found.append({"press": ["AdaKVPress", "CURPress"], "options": {"AdaKVPress": {"alpha_safeguard": 0.5}}})
    return [{**case, "keep": KEEP} for case in found]


class Seen(NamedTuple):
    """A layer as kvpress's model computed it: k, v [kv_heads, tokens, dim], rotated q [q_heads, tokens, dim]."""

    layer: Layer
    k: Tensor
    v: Tensor
    q: Tensor

    def to(self, policy: Policy) -> LayerView:
        return view(policy, LayerData.dense(self.k, self.v), of=self.layer, queries=self.q)


Answers = tuple[list[Seen], dict[str, Tensor]]


@pytest.fixture(scope="module", params=list(CATALOGUE))
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """A few full layers, and all that came back."""
    folder = tmp_path_factory.mktemp("kvpress")
    loaded, sample = context_of(request.param)
    layers = full_layers(loaded.layout)
    layers = layers[:: max(1, len(layers) // LAYERS)]
    job = {
        "model": str(model_dir(request.param)),
        "ids": list(sample.context_ids[:TOKENS]),
        "layers": [layer.index for layer in layers],
        "cases": [*cases(), {"press": ["ThinKPress"], "options": {}, "prune": 0.4}],
        "seed": int(torch.randint(2**31, (1,), generator=memory(SEED).generator())),
    }
    (folder / "job.json").write_text(json.dumps(job))
    peer = Path(__file__).with_name("kvpress_peer.py")
    subprocess.run([str(PEER), str(peer), str(folder / "job.json"), str(folder / "result.safetensors")], check=True)
    found = load_file(folder / "result.safetensors")
    return [Seen(layer, *(found[f"{layer.index}/{side}"] for side in ("k", "v", "q"))) for layer in layers], found


def test_the_bridge_keeps_what_the_press_keeps_inside_the_model(answers: Answers) -> None:
    rows, found = answers
    print()
    for number, case in enumerate(cases()):
        names, options = case["press"], case["options"]
        assert isinstance(names, list) and isinstance(options, dict)
        name = "(".join(names) + ")" * (len(names) - 1)
        text = ";".join(f"{key}={value}" for own in options.values() for key, value in own.items())
        kind = KvpressCritical if PRESSES[names[0]].output else Kvpress
        policy, differ, far, total = kind(name, text), 0, 0.0, 0
        for row in rows:
            index = row.layer.index
            mem = Memory(artefact=Artefact({f"layer{index}": found[f"{index}/output"]}), rng=memory(SEED).generator())
            mine = policy.ask(row.to(policy), index, int(found["num_layers"]), KEEP, mem)
            theirs = found[f"{index}/kept{number}"]
            assert "score" in mine or torch.equal(mine["keep"], theirs)  # BlockPress has many scores and no one cut
            count, away = apart(mine["keep"], theirs, mine.get("score", torch.zeros(theirs.shape)))
            differ, far, total = differ + count, max(far, away), total + int(theirs.sum())
        print(f"{policy.label:70} {differ:4} of {total} differ, at most {far:.1e} from the cut")
        assert far <= NEAR and differ <= total // 100  # LeverageScorePress inverts what rounding has moved


def test_think_drops_the_channels_that_its_press_zeroes(answers: Answers) -> None:
    rows, found = answers
    policy = ThinK(prune=0.4, window=32)
    for row in rows:
        assert torch.equal(policy.kept_channels(row.to(policy)), found[f"{row.layer.index}/channels"])


def test_every_press_of_the_package_is_listed_as_asked_or_refused() -> None:
    code = "import kvpress; print(*(n for n in vars(kvpress) if n.endswith('Press') and n[0].isupper()))"
    done = subprocess.run([str(PEER), "-c", code], check=True, capture_output=True, text=True)
    assert set(PRESSES) | set(REFUSED) == set(done.stdout.splitlines()[-1].split())
