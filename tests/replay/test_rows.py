"""What of an arm's greedy tokens is its reply: all arms decode equally long, past the model's own end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvassay.replay import rows


@pytest.mark.parametrize(
    ("generated", "end", "reply", "ended"),
    [
        ([5, 6, 7], 2, [5, 6, 7], False),
        ([5, 2, 7, 2], 2, [5, 2], True),
        ([2, 6, 7], 2, [2], True),
        ([5, 6, 7], None, [5, 6, 7], False),
    ],
)
def test_a_reply_goes_up_to_the_first_end_token(
    generated: list[int], end: int | None, reply: list[int], ended: bool
) -> None:
    assert rows._reply(generated, SimpleNamespace(eos_token_id=end)) == (reply, ended)


def test_replies_diverge_where_tokens_differ_or_one_has_ended() -> None:
    assert rows._divergence([5, 6, 7], [5, 6, 7]) is None
    assert rows._divergence([5, 9, 7], [5, 6, 7]) == 1
    assert rows._divergence([5, 6], [5, 6, 7]) == 2
    assert rows._divergence([5, 6, 2], [5, 6]) == 2
