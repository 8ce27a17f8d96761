"""Parameter types shared by the command-line verbs."""

from __future__ import annotations

import re
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


class ByteCount(_IntParam):
    """A number of bytes: `1000000`, `40GiB`, `80GB`."""

    name = "bytes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes; fails for anything but a whole, positive number of them."""
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?)?B?", str(value).strip())
        if found is None:
            self.fail(f"'{value}' is no number of bytes, such as 1000000, 40GiB or 80GB", param, ctx)
        number, prefix = found.groups()
        power = "KMGT".index(prefix[0]) + 1 if prefix else 0
        count = float(number) * (1024 if prefix and prefix.endswith("i") else 1000) ** power
        if count < 1 or count != int(count):
            self.fail(f"'{value}' is no whole, positive number of bytes", param, ctx)
        return int(count)


engine_option = click.option(
    "--engine",
    type=click.Choice(["transformers", "vllm"]),
    default="transformers",
    show_default=True,
    help="What runs the model: transformers, or vLLM on the CPU (`make vllm-setup`).",
)
"""Which recorder."""
