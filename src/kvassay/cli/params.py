"""Parameter types shared by the command-line verbs."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    IntParam = click.ParamType[int]
else:
    IntParam = click.ParamType  # generic for type checkers, and in newer versions of click only

_UNITS = {"": 1, "k": 1024, "m": 1024**2}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)([km]?)", re.IGNORECASE)


class TokenCount(IntParam):
    """A number of tokens: `4096`, `4k`, `128k`, `1M`, where k is 1024 and M is 1024 x 1024."""

    name = "tokens"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the tokens; fails for anything but a whole, positive number of them."""
        if isinstance(value, int):
            return value
        match = _PATTERN.fullmatch(str(value).strip().replace("_", ""))
        if match is None:
            self.fail(f"'{value}' is not a number of tokens (like 4096, 4k, 128k or 1M)", param, ctx)
        tokens = Fraction(match[1]) * _UNITS[match[2].lower()]
        if tokens.denominator != 1 or tokens < 1:
            self.fail(f"'{value}' is {float(tokens):g} tokens: a whole number from 1 on is needed", param, ctx)
        return int(tokens)
