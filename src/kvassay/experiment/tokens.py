"""Numbers of tokens as people write them: `4096`, `4k`, `1M`, with k = 1024."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"": 1, "k": 1024, "m": 1024**2}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)([km]?)", re.IGNORECASE)


def parse_tokens(value: object) -> int:
    """Return a positive whole number of tokens; `ValueError`, on one line, for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        tokens = Fraction(value)
    else:
        match = _PATTERN.fullmatch(str(value).strip().replace("_", ""))
        if match is None:
            raise ValueError(f"'{value}' is not a number of tokens (like 4096, 4k, 128k or 1M)")
        tokens = Fraction(match[1]) * _UNITS[match[2].lower()]
    if tokens.denominator != 1 or tokens < 1:
        raise ValueError(f"'{value}' is {float(tokens):g} tokens: a whole number from 1 on is needed")
    return int(tokens)


def show_tokens(tokens: int) -> str:
    """Return the short form that `parse_tokens` reads back: 2048 is `2k`, 1000 is `1000`."""
    for unit, name in ((1024**2, "M"), (1024, "k")):
        if tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return str(tokens)
