"""Our policies against kvpress, on the same recorded keys, values and queries of the two embedded models.

`make kvpress-parity` makes kvpress's environment and runs this. No token is protected, so both choose freely. Kept
sets must be the same but for tokens whose score is within 1e-4, relatively, of the best that kvpress dropped. Where a
definition differs, the difference itself is tested: PyramidKV's layers, H2O against ObservedAttentionPress.

Not here: `random`, which draws other numbers; `r-kv`, which kvpress has not; `think`, whose channels are in
`test_kvpress_presses.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from kvassay.policy.base import Policy, top_k_mask
from kvassay.policy.h2o import H2O
from kvassay.policy.kvpress.policy import Kvpress
from kvassay.policy.pyramidkv import PyramidKV
from kvassay.policy.registry import make
from kvassay.policy.views import LayerView
from kvassay.record.models import CATALOGUE
from tests.policy.build import allowance, cache, memory, view
from tests.policy.kvpress_cases import BUDGETS, CONTEXT, MARKS, NEAR, Shown, apart, recorded

pytestmark = MARKS
SHARED: Mapping[str, str] = {
    "knorm": "KnormPress",
    "keydiff": "KeyDiffPress",
    "streaming": "StreamingLLMPress",
    "tova": "TOVAPress",
    "snapkv": "SnapKVPress",
    "pyramidkv": "PyramidKVPress",
    "adakv-snapkv": "AdaKVPress(SnapKVPress)",
    "expected-attention": "ExpectedAttentionPress",
}
FLAT = {"adakv-snapkv"}
"""One cut for all heads of a layer."""
PYRAMIDS = {"pyramidkv"}
"""A layer's budget depends on all layers."""
LAYERS = 6


@pytest.fixture(scope="module", params=list(CATALOGUE))
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Shown]:
    return recorded(request.param, tmp_path_factory.mktemp("parity"))


def shown(policy: Policy, row: Shown) -> LayerView:
    return view(policy, row.data, of=row.layer, queries=row.q)


def scores_of(policy: Policy, rows: list[Shown]) -> dict[int, Tensor]:
    return {row.layer.index: policy.score(shown(policy, row), memory()) for row in rows}


def ours(policy: Policy, rows: list[Shown], scores: Mapping[int, Tensor], tokens: int) -> dict[int, Tensor]:
    """What our policy keeps of each layer, all layers decided at once."""
    views = [shown(policy, row) for row in rows]
    decision = policy.decide(cache(*views), scores, memory(), allowance(tokens, CONTEXT))
    return {index: edits[0].keep for index, edits in decision.edits.items()}  # type: ignore[union-attr]


def theirs(press: str, row: Shown, tokens: int) -> dict[str, Tensor]:
    policy = Kvpress(press)
    return policy.ask(shown(policy, row), row.ordinal, row.layers, tokens, memory())


@pytest.mark.parametrize("name", SHARED)
def test_both_keep_the_same_tokens(rows: list[Shown], name: str) -> None:
    print()
    looked_at = rows[:: max(1, len(rows) // LAYERS)]
    decided = rows if name in PYRAMIDS else looked_at
    policy = make(name)
    scores = scores_of(policy, decided)
    for tokens in BUDGETS:
        kept = ours(policy, decided, scores, tokens)
        same = total = differ = 0
        far = 0.0
        for row in looked_at:
            mine, answer = kept[row.layer.index], theirs(SHARED[name], row, tokens)
            score, keep = answer["score"], answer["keep"]
            if name in FLAT:
                mine, keep, score = (x.reshape(1, -1) for x in (mine, keep, score))
            count, away = apart(mine, keep, score)
            differ, far = differ + count, max(far, away)
            same, total = same + int((mine & keep).sum()), total + int(keep.sum())
            assert mine.sum() == keep.sum()
        print(
            f"{rows[0].layers:2} full layers  {name:20} {SHARED[name]:26} {tokens / CONTEXT:5.3f} kept: "
            f"{same / total:8.4%} of {total} alike, {differ} differ, at most {far:.1e} from the cut"
        )
        assert far <= NEAR and differ <= total // 200  # ties: equal keys of equal tokens in the first layer


def test_pyramidkv_gives_a_hybrids_full_layers_the_budgets_of_a_model_that_has_no_others(rows: list[Shown]) -> None:
    """kvpress numbers all layers, ours those it acts on: in a hybrid the means differ, and by exactly this much."""
    policy, index = PyramidKV(), rows[-1].layer.index
    for tokens in BUDGETS:
        mean = sum(policy.layer_budget(row.ordinal, row.layers, CONTEXT, tokens, policy.window) for row in rows)
        assert abs(mean / len(rows) - tokens) <= 0.5
        press = Kvpress("PyramidKVPress")
        as_kvpress = press.ask(shown(press, rows[-1]), index, index + 1, tokens, memory())["keep"]
        own = policy.layer_budget(index, index + 1, CONTEXT, tokens, policy.window)
        assert as_kvpress.sum(1).tolist() == [own] * len(as_kvpress)


def test_h2o_sums_where_observed_attention_takes_the_mean_over_the_queries_that_see_a_token(rows: list[Shown]) -> None:
    policy, seen = H2O(recent=0.0), torch.arange(CONTEXT, 0, -1)
    alike = {tokens: [0, 0, 0] for tokens in BUDGETS}
    for row in rows[:: max(1, len(rows) // LAYERS)]:
        at = shown(policy, row)
        score, none = policy.score(at, memory()), torch.zeros_like(at.alive)
        mean = score / seen / row.layer.group_size
        for tokens, sums in alike.items():
            answer = theirs("ObservedAttentionPress", row, tokens)
            torch.testing.assert_close(mean, answer["score"], rtol=1e-4, atol=1e-9)
            as_kvpress, summed = (top_k_mask(by, at.alive, none, tokens) for by in (mean, score))
            count, away = apart(as_kvpress, answer["keep"], answer["score"])
            assert away <= NEAR and count <= answer["keep"].sum() // 200
            assert not torch.equal(summed, answer["keep"])
            for which, mask in enumerate((as_kvpress, summed, answer["keep"])):
                sums[which] += int((mask & answer["keep"]).sum())
    print()
    for tokens, (divided, summed, total) in alike.items():
        print(
            f"{rows[0].layers:2} full layers  {'h2o':20} {'ObservedAttentionPress':26} {tokens / CONTEXT:5.3f} kept: "
            f"{divided / total:8.4%} of {total} alike with sums divided by queries, {summed / total:8.4%} as it is"
        )
