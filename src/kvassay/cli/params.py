"""Parameter types shared by the command-line verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvassay.experiment.tokens import parse_tokens

# Generic from click 8.2 on, and only for type checkers.
if TYPE_CHECKING:
    _IntParam = click.ParamType[int]
else:
    _IntParam = click.ParamType


class TokenCount(_IntParam):
    """A number of tokens: `4096`, `4k`, `128k`, `1M`, where k is 1024 and M is 1024 x 1024."""

    name = "tokens"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the tokens; fails for anything but a whole, positive number of them."""
        try:
            return parse_tokens(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
