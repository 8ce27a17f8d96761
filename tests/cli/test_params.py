from __future__ import annotations

import click
import pytest

from kvassay.cli.params import TokenCount


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("4096", 4096),
        ("4k", 4096),
        ("128K", 131_072),
        ("1M", 1_048_576),
        ("1.5k", 1536),
        ("32_768", 32_768),
        (" 2k ", 2048),
    ],
)
def test_sizes(text: str, tokens: int) -> None:
    assert TokenCount().convert(text, None, None) == tokens


@pytest.mark.parametrize("text", ["", "k", "4kb", "-1", "0", "0.3", "1.0001k", "1e5", "four"])
def test_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        TokenCount().convert(text, None, None)


def test_a_default_that_is_a_number_already() -> None:
    assert TokenCount().convert(2048, None, None) == 2048
