"""Which presses of kvpress 0.5.5 can be asked for a keep mask, what they read, and why the others cannot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvassay.errors import PolicyError, did_you_mean

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Press:
    """What a press reads beside keys and values.

    window: how many of the last queries it reads, 0 for none; `window_size` is an option of some
    every: it reads the queries of all positions
    unrotated: it takes the rotation of keys back
    wraps: it is made round another press, whose needs are its own
    only: the inner presses it works with; empty for any that is no wrapper itself
    attention: it sums whole attention maps [tokens, tokens]
    output: it weighs values with the layer's output projection
    """

    window: int = 0
    every: bool = False
    unrotated: bool = False
    wraps: bool = False
    only: tuple[str, ...] = ()
    attention: bool = False
    output: bool = False


NO_QUERIES = ("KnormPress", "KeyDiffPress", "LagKVPress", "CURPress")

PRESSES: Mapping[str, Press] = {
    "KnormPress": Press(),
    "KeyDiffPress": Press(),
    "StreamingLLMPress": Press(),
    "LagKVPress": Press(),
    "CURPress": Press(),
    "RandomPress": Press(),
    "TOVAPress": Press(window=1),
    "SnapKVPress": Press(window=64),
    "PyramidKVPress": Press(window=64),
    "ExpectedAttentionPress": Press(every=True),
    "CapPress": Press(every=True),
    "NonCausalAttnPress": Press(every=True),
    "LeverageScorePress": Press(unrotated=True),
    "CompactorPress": Press(every=True),
    "ObservedAttentionPress": Press(every=True, attention=True),
    "AdaKVPress": Press(wraps=True),
    "ChunkKVPress": Press(wraps=True),
    "EntropyGatedChunkKVPress": Press(wraps=True),
    "BlockPress": Press(wraps=True, only=NO_QUERIES),
    "ChunkPress": Press(wraps=True, only=NO_QUERIES),
    "CriticalKVPress": Press(wraps=True, output=True),
    "CriticalAdaKVPress": Press(wraps=True, output=True),
}

_TRAINED = "it loads parts trained for one model from the Hugging Face hub"
_AGAIN = "it runs the model over the context again; a helper that has recorded tensors alone cannot"
_DECODES = "it acts while tokens are generated; a press is asked once, when the context is compressed"

REFUSED: Mapping[str, str] = {
    "KVzapPress": _TRAINED,
    "FastKVzipPress": _TRAINED,
    "QFilterPress": _TRAINED,
    "ExpectedAttentionStatsPress": _TRAINED,
    "DuoAttentionPress": _TRAINED,
    "LUKVPress": _TRAINED,
    "RestoreKVPress": _TRAINED,
    "KVzipPress": _AGAIN,
    "KVgradPress": _AGAIN,
    "KVComposePress": _AGAIN,
    "DecodingPress": _DECODES,
    "CompressionRatioDecodingPress": _DECODES,
    "PrefillDecodingPress": _DECODES,
    "CAMPress": _DECODES + ", and it rewrites values",
    "DMSPress": "a threshold on scores decides how much goes, so it takes no budget",
    "SimLayerKVPress": "a threshold on attention decides which layers are cut, so it takes no budget",
    "FinchPress": "it needs the question marked off inside the context, which no policy is shown",
    "MergingPress": "it rewrites values; use selkv or nearest-merge",
    "KeyRerotationPress": "it renumbers the keys it keeps; here they keep the rotation of their true position",
    "ThinKPress": "it zeroes key channels and drops no token; use think",
    "ComposedPress": "it runs several presses one after the other, each at a ratio of its own",
    "PerLayerCompressionPress": "it takes a list of ratios, one per layer, and no budget",
    "BasePress": "it is a base class",
    "ScorerPress": "it is a base class",
}


@dataclass(frozen=True)
class Chain:
    """A press and what is inside it, outermost first, with the options of all of them."""

    names: tuple[str, ...]
    options: Options

    @property
    def attention(self) -> bool:
        """Whether whole attention maps are summed."""
        return any(PRESSES[name].attention for name in self.names)

    @property
    def rotation(self) -> bool:
        """Whether queries or keys are turned: the layer's rotation must be one that presses know."""
        return any(PRESSES[name].unrotated for name in self.names) or self.queries(2) > 0

    @property
    def output(self) -> bool:
        """Whether the layer's output projection is read."""
        return any(PRESSES[name].output for name in self.names)

    def queries(self, every: int) -> int:
        """How many of the last queries are read, `every` for all."""
        known = [PRESSES[name] for name in self.names]
        if any(press.every for press in known):
            return every
        window = max(press.window for press in known)
        return int(self.options.get("window_size", window)) if window > 1 else window


def parse(press: str, options: str) -> Chain:
    """A chain from ``AdaKVPress(SnapKVPress)`` and ``window_size=32;kernel_size=7``.

    Raises `PolicyError` for a press that is unknown or cannot be asked, and for options of another form.
    """
    names = tuple(part.strip() for part in press.replace(")", "").split("("))
    if not re.fullmatch(r"\s*\w+\s*(\(\s*\w+\s*\)\s*)?", press):
        raise PolicyError(
            f"policy 'kvpress': press={press!r} is not of the form SnapKVPress or AdaKVPress(SnapKVPress)"
        )
    for name in names:
        if name in REFUSED:
            raise PolicyError(f"policy 'kvpress' cannot ask {name}: {REFUSED[name]}")
        if name not in PRESSES:
            raise PolicyError(f"policy 'kvpress': unknown press '{name}'{did_you_mean(name, PRESSES)}")
    _check_nesting(names)
    return Chain(names, _options(options))


def _check_nesting(names: tuple[str, ...]) -> None:
    outer = PRESSES[names[0]]
    if not outer.wraps:
        if len(names) > 1:
            raise PolicyError(f"policy 'kvpress': {names[0]} is made round no other press")
        return
    inner = [name for name, known in PRESSES.items() if not known.wraps and not known.attention]
    allowed = outer.only or tuple(inner)
    if len(names) < 2 or names[1] not in allowed:
        raise PolicyError(f"policy 'kvpress': {names[0]} is made round one of {', '.join(allowed)}")


def _options(text: str) -> Options:
    found: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals or not key or not value or key in found or key == "compression_ratio":
            raise PolicyError(
                f"policy 'kvpress': options={text!r}: '{part}' is not of the form name=value, is given twice, or is "
                "set by the budget; separate options by ';'"
            )
        found[key] = _value(value)
    return found


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
