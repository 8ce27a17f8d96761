"""Window- and step-evidence policies plan a 128K-token layer of 8 x 128 in under 2 GiB beyond the cache.

Proved at an eighth of that length under an eighth of that bound, the pieces in which work is streamed cut alike.
"""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from kvassay.errors import PolicyError
from kvassay.measure.plan_cost import RESET, Shape, plan_cost
from kvassay.policy import r_kv
from kvassay.policy.base import EVERY_QUERY
from kvassay.policy.card import Effect, Evidence
from kvassay.policy.registry import BUILT_IN, get, make, parse

LAW, TOKENS = 2 << 30, 128 * 1024
FROM_THE_MODEL = {Evidence.WEIGHTS, Evidence.OCCLUSION}
EVERY = [name for name in BUILT_IN if not get(name).card.external and not get(name).card.evidence & FROM_THE_MODEL]
ACTING = [name for name in EVERY if get(name).card.effects != {Effect.NONE}]
QUERIES = [name for name in ACTING if make(name).queries_needed >= EVERY_QUERY]
QUADRATIC = [name for name in ACTING if make(name).compares_tokens]

needs_linux = pytest.mark.skipif(not RESET.exists(), reason="the peak of resident memory is Linux's")


FAST = {"snapkv", "keydiff", "quest", "selkv"}
"""One of each kind; the others take a while longer."""


@needs_linux
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in (*ACTING, "snapkv+int8", "selkv+kivi", "locks+int8")
        if name not in QUERIES
    ],
)
def test_planning_takes_its_share_of_two_gib(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = parse(name)
    part = 64 if policy.compares_tokens else 8  # quadratic work: a shorter layer says as much of memory
    bound = LAW // part + (8 << 20)  # what the allocator and the interpreter keep
    with monkeypatch.context() as patched:
        peak = peak_of_a_part(patched, name, part)
    if peak >= bound:  # what earlier tests have left of the heap only ever adds
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            peak = fresh.submit(peak_of_a_part, pytest.MonkeyPatch(), name, part).result()
    assert peak < bound


def peak_of_a_part(patch: pytest.MonkeyPatch, name: str, part: int) -> int:
    """Peak bytes of planning a part of the tokens in a part of the pieces."""
    patch.setattr(r_kv, "COSINES", r_kv.COSINES // part)
    torch.set_num_threads(1)
    return plan_cost(parse(name), TOKENS // part).peak_bytes


@needs_linux
def test_the_measurement_sees_what_is_held() -> None:
    """A copy of all keys is there, and nothing is where nothing is done."""
    torch.set_num_threads(1)
    keys = 8192 * 8 * 128 * 4
    assert keys < plan_cost(make("think"), 8192).peak_bytes < 4 * keys
    assert plan_cost(make("recency"), 8192).peak_bytes < keys // 4


@pytest.mark.parametrize("name", sorted({*QUERIES, *QUADRATIC}))
def test_a_context_too_long_is_refused_with_what_it_would_take(name: str) -> None:
    """70,000^2 / 2 x 8 multiply-adds of each of four query heads, or of each of two KV heads."""
    work = {"h2o": "7.8e+10", "r-kv": "3.9e+10", "nearest-merge": "3.9e+10"}
    said = f"about {work[name]} multiply-adds" if name in work else "needs every prompt query"
    with pytest.raises(PolicyError, match=rf"{re.escape(said)}.* per layer at 70000 tokens; run on up to 65536"):
        plan_cost(make(name), 70_000, Shape(q_heads=4, kv_heads=2, dim=8))
    assert any("refused above 65,536 tokens" in limit for limit in get(name).card.limits)


def test_what_is_known_to_be_quadratic() -> None:
    assert {"h2o", "expected-attention"} == set(QUERIES)
    assert {"h2o", "r-kv", "nearest-merge"} == set(QUADRATIC)
