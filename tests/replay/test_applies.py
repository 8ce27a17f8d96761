"""Which policies have no place in a model, at a length or in its blocks: said before anything is replayed."""

from __future__ import annotations

import pytest

from kvassay.layout.config import from_config
from kvassay.policy.registry import parse
from kvassay.replay.applies import refusal
from tests.layout.configs import PUBLISHED

GEMMA = from_config(PUBLISHED["gemma-3-270m"])
"""One KV head of 256 under four query heads."""
MIMO = from_config(PUBLISHED["mimo-v2-flash"])
"""Keys of 192 and values of 128; 4 KV heads on the full layers, 8 on the sliding ones."""


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("h2o", "needs every prompt query (0.3 GiB in float32) and compares tokens with each other (about 2.2e+12"),
        ("r-kv", "compares tokens with each other (about 5.5e+11"),
        ("r-kv~shuffled", "compares tokens with each other (about 5.5e+11"),
        ("nearest-merge", "compares tokens with each other (about 5.5e+11"),
        ("nearest-merge+int8", "compares tokens with each other (about 5.5e+11"),
    ],
)
def test_quadratic_work_is_refused_above_its_length_with_the_work(name: str, work: str) -> None:
    """65,537^2 / 2 pairs of 256 multiply-adds, for each query or KV head."""
    says = f"{work} multiply-adds), per layer at 65537 tokens; run on up to 65536"
    assert refusal(parse(name), GEMMA, 65_537, 16) == says
    assert refusal(parse(name), GEMMA, 65_536, 16) is None


def test_what_needs_every_query_is_refused_above_that_length_with_their_size() -> None:
    """Four heads x 65,537 x 256 float32 numbers; its work grows with the length alone."""
    says = "needs every prompt query (0.3 GiB in float32), per layer at 65537 tokens; run on up to 65536"
    assert refusal(parse("expected-attention"), GEMMA, 65_537, 16) == says


@pytest.mark.parametrize("name", ["snapkv", "quest", "selkv", "kivi", "dense"])
def test_other_work_is_not(name: str) -> None:
    assert refusal(parse(name), GEMMA, 1 << 20, 16) is None


@pytest.mark.parametrize("name", ["locks", "quest", "centroid", "locks+fp8"])
def test_blocks_smaller_than_the_caches_are_refused_with_the_size_that_fits(name: str) -> None:
    """A full layer's token takes half the bytes of a sliding one's, so its blocks hold twice as many."""
    full = sum(layer.window is None for layer in MIMO.layers)
    says = (
        "it reads blocks of 16 tokens, the cache's blocks hold 32 in "
        f"{full} of {len(MIMO.layers)} layers: give block=32 or a multiple"
    )
    assert refusal(parse(name), MIMO, 4096, 16) == says
    first, *rest = name.split("+")
    assert refusal(parse("+".join([f"{first}(block=32)", *rest])), MIMO, 4096, 16) is None
    assert refusal(parse(name), MIMO, 4096, 8) is None


def test_what_reads_tokens_fits_any_block() -> None:
    assert refusal(parse("exact_mass"), MIMO, 4096, 16) is None
    assert refusal(parse("m3-exact-mass"), MIMO, 4096, 16) is None  # 128 is four of 32
