"""Policies by name: the built-in ones, installed plug-ins, and classes in a file.

A name is ``snapkv``, the entry-point name of an installed package (group ``kvassay.policies``), or
``path/to/file.py:ClassName``; ``~flipped``, ``~shuffled`` or ``~merge-off`` after it asks for a control twin.
Several joined by ``+`` are one policy (`kvassay.policy.compose`).
Looking a name up imports that policy alone, and `names()` imports none.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from kvassay.errors import PolicyError, did_you_mean

if TYPE_CHECKING:
    from kvassay.policy.base import Policy
    from kvassay.policy.composition import Part

GROUP = "kvassay.policies"

BUILT_IN = {
    "dense": "dense:Dense",
    "random": "random:Random",
    "recency": "recency:Recency",
    "streaming": "streaming:Streaming",
    "snapkv": "snapkv:SnapKV",
    "keydiff": "keydiff:KeyDiff",
    "pyramidkv": "pyramidkv:PyramidKV",
    "adakv-snapkv": "adakv:AdaSnapKV",
    "tova": "tova:Tova",
    "h2o": "h2o:H2O",
    "expected-attention": "expected_attention:ExpectedAttention",
    "r-kv": "r_kv:RKV",
    "kara": "kara:Kara",
    "epikv-uncal": "epikv:EpiKV",
    "epikv": "epikv_calibrated:EpiKVCalibrated",
    "knorm": "knorm:KeyNorm",
    "paged-eviction": "paged_eviction:PagedEviction",
    "quest": "quest:Quest",
    "locks": "locks:Locks",
    "centroid": "centroid:Centroid",
    "m3-exact-mass": "m3:M3ExactMass",
    "m3-distilled": "m3_distilled:M3Distilled",
    "exact_mass": "exact_mass:ExactMass",
    "hindsight": "hindsight:Hindsight",
    "kivi": "kivi:Kivi",
    "fp8": "fp8:Fp8",
    "int8": "int8:Int8",
    "think": "think:ThinK",
    "rdkv": "rdkv:RDKV",
    "rdkv-calibrated": "rdkv_calibrated:RDKVCalibrated",
    "svd": "svd:Svd",
    "recalkv": "recalkv:ReCalKV",
    "dynacalkv": "dynacalkv:DynaCalKV",
    "nearest-merge": "merge:NearestMerge",
    "selkv": "selkv:SelKV",
    "kvpress": "kvpress.policy:Kvpress",
    "kvpress-critical": "kvpress.critical:KvpressCritical",
}

_WRITTEN = {
    "evict": ("score", "decide"),
    "merge": ("decide",),
    "quantize": ("decide",),
    "low_rank": ("decide", "project"),
    "select": ("read",),
}
"""Effect: the methods, one of which a policy writes that has it; without any, it would run as dense."""


def names() -> list[str]:
    """Every name that needs no path: built-in ones in their order, then plug-ins sorted; nothing is imported."""
    return [*BUILT_IN, *sorted(_plugins())]


def get(name: str) -> type[Policy]:
    """The policy class of a name; `PolicyError` on one line if there is none or it is not a policy."""
    base, *kinds = name.split("~")
    found = _resolve(base)
    for kind in kinds:
        from kvassay.policy.twins import twin

        found = twin(found, kind)
    return found


def make(name: str, **parameters: object) -> Policy:
    """A policy with parameters; text is converted to the type of the field it is for."""
    found = get(name)
    hints = get_type_hints(found)
    known = {f.name: hints[f.name] for f in dataclasses.fields(found)}  # type: ignore[arg-type]
    for key in parameters:
        if key not in known:
            hint = did_you_mean(key, known) if known else " (it has none)"
            raise PolicyError(f"policy '{found.card.name}' has no parameter '{key}'{hint}")
    try:
        return found(**{k: _coerce(found.card.name, k, v, known[k]) for k, v in parameters.items()})
    except TypeError as error:
        raise PolicyError(f"policy '{found.card.name}': {error}") from None


def parse(text: str, base: Path | None = None) -> Policy:
    """A policy from ``snapkv``, ``snapkv(window=32, kernel=7)`` or ``snapkv+int8``: the inverse of a policy's label.

    Parts of a composition are joined by ``+``; a budget in a part's brackets, ``snapkv(keep=0.5)``, is that part's own.
    Plug-in files are looked up from `base`.
    """
    parts = _parts(text)
    if len(parts) == 1:
        name, parameters = _taken_apart(text)
        return make(_from(base, name), **parameters)
    from kvassay.policy.compose import Composed

    return Composed(tuple(_part(one, base) for one in parts))


def check_names(text: str, base: Path | None = None) -> None:
    """Raise the `PolicyError` of `parse` for a form that is wrong or a name that is not there; nothing is imported."""
    for part in _parts(text):
        name, _ = _taken_apart(part)
        _check_there(_from(base, name).split("~")[0])


def _parts(text: str) -> list[str]:
    """The parts of a composition, or the one policy."""
    parts = re.split(r"\+(?![^()]*\))", text)
    for number, part in enumerate(parts, 1):
        if not part.strip() and len(parts) > 1:
            raise PolicyError(
                f"policy '{text}': part {number} of {len(parts)} is empty; write a name on each side of '+'"
            )
    return parts


def _part(text: str, base: Path | None) -> Part:
    """One part of a composition, with its own budget if its brackets hold one."""
    from kvassay.policy.budget import UNITS, Budget
    from kvassay.policy.composition import Part

    name, parameters = _taken_apart(text)
    found = get(_from(base, name))
    fields = {field.name for field in dataclasses.fields(found)}  # type: ignore[arg-type]
    budgets = [f"{key}={parameters.pop(key)}" for key in set(UNITS) & set(parameters) - fields]
    if len(budgets) > 1:
        raise PolicyError(f"policy '{text.strip()}': one budget at most, not {' and '.join(sorted(budgets))}")
    return Part(make(_from(base, name), **parameters), Budget.parse(budgets[0]) if budgets else None)


def _from(base: Path | None, name: str) -> str:
    """The name, the path of a plug-in file in it taken from `base`; its `~` is the user's home, no twin's mark."""
    file, dot, rest = name.partition(".py:")
    return f"{(base or Path()) / Path(file).expanduser()}.py:{rest}" if dot else name


def _taken_apart(text: str) -> tuple[str, dict[str, object]]:
    """Name and parameters of ``name(parameter=value, ...)``."""
    match = re.fullmatch(r"\s*([^()]+?)\s*(?:\((.*)\))?\s*", text)
    if not match:
        raise PolicyError(f"policy '{text}' is not of the form name or name(parameter=value, ...)")
    parameters: dict[str, object] = {}
    for part in filter(None, (p.strip() for p in (match.group(2) or "").split(","))):
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals or not key or not value:
            raise PolicyError(f"policy '{text}': '{part}' is not of the form parameter=value")
        if key in parameters:
            raise PolicyError(f"policy '{text}': parameter '{key}' is given twice")
        parameters[key] = value.strip("'\"")
    return match.group(1), parameters


def _check_there(name: str) -> None:
    """Raise `PolicyError` for a name that is none of `names()` and no class of a file that is there."""
    if ".py:" in name:
        file = _file_of(name.rsplit(":", 1)[0])
        if not file.is_file():
            raise PolicyError(f"policy '{name}': there is no file {file}")
    elif name.endswith(".py"):
        raise PolicyError(f"policy '{name}': name a class of the file, e.g. {name}:MyPolicy")
    elif name not in names():
        raise PolicyError(f"unknown policy '{name}'{did_you_mean(name, names())}")


def _file_of(path: str) -> Path:
    return Path(path).expanduser().resolve()


def _resolve(name: str) -> type[Policy]:
    _check_there(name)
    if ".py:" in name:
        return _from_file(*name.rsplit(":", 1))
    if name in BUILT_IN:
        module, attribute = BUILT_IN[name].split(":")
        found: type[Policy] = getattr(importlib.import_module(f"kvassay.policy.{module}"), attribute)
        return found
    return _from_entry_point(_plugins()[name])


def _plugins() -> dict[str, EntryPoint]:
    """Installed entry points by name; `PolicyError` where two share a name or one takes a built-in's."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name in BUILT_IN or (point.name in found and found[point.name].value != point.value):
            owner = "the built-in policy" if point.name in BUILT_IN else f"'{found[point.name].value}'"
            raise PolicyError(
                f"entry point '{point.name} = {point.value}' ({GROUP}) takes the name of {owner}; rename it"
            )
        found[point.name] = point
    return found


def _from_entry_point(point: EntryPoint) -> type[Policy]:
    where = f"policy '{point.name}' (entry point {point.value})"
    try:
        loaded = point.load()
    except Exception as error:
        raise PolicyError(f"{where} cannot be loaded: {_line(error)}") from error
    found = _checked(loaded, where)
    if found.card.name != point.name:
        raise PolicyError(f"{where}: its card is named '{found.card.name}'; card and entry point must agree")
    return found


def _from_file(path: str, attribute: str) -> type[Policy]:
    """A class of a Python file, which is run once per path, so that the class keeps its identity."""
    file, where = _file_of(path), f"policy '{path}:{attribute}'"
    name = "kvassay_plugin_" + re.sub(r"\W", "_", str(file))
    if name not in sys.modules:
        _import_file(name, file, where)
    module = sys.modules[name]
    if not hasattr(module, attribute):
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == name]
        raise PolicyError(f"{where}: no class '{attribute}' in the file{did_you_mean(attribute, classes)}")
    found = _checked(getattr(module, attribute), where)
    taken = found.card.name
    if found.__module__ == name and taken in names():
        raise PolicyError(
            f"{where}: {file.name} defines a policy named '{taken}', and kvassay has one of that name already; change "
            f'name="{taken}" in its card, say to name="my-{taken}"'
        )
    return found


def _import_file(name: str, file: Path, where: str) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PolicyError(f"{where}: {file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up while they are made
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise PolicyError(f"{where}: importing the file failed: {_line(error)}") from error


def _checked(found: Any, where: str) -> type[Policy]:
    """The class itself, if it is a policy: a frozen dataclass, derived from Policy, that writes what its card says."""
    from kvassay.policy.base import Policy
    from kvassay.policy.card import Card

    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise PolicyError(f"{where} is not a subclass of kvassay.policy.base.Policy")
    options = vars(found).get("__dataclass_params__")
    if options is None or not options.frozen:
        raise PolicyError(f"{where} is not a frozen dataclass; put @dataclass(frozen=True) above the class")
    if not isinstance(getattr(found, "card", None), Card):
        raise PolicyError(f"{where} has no card; add `card: ClassVar[Card] = Card(...)` to the class")
    _check_effects(found, where)
    return found


def _check_effects(found: type[Policy], where: str) -> None:
    from kvassay.policy.base import Policy

    for effect in sorted(found.card.effects):
        methods = _WRITTEN.get(effect, ())
        if methods and all(getattr(found, method) is getattr(Policy, method) for method in methods):
            wanted = " or ".join(f"`{method}`" for method in methods)
            raise PolicyError(
                f"{where}: its card says effect '{effect}', and nothing in the class does it; write {wanted}"
            )


def _coerce(policy: str, key: str, value: object, wanted: Any) -> object:
    """`value` as the annotated type: int, float, bool, str or a Literal of texts."""
    if get_origin(wanted) is Literal:
        if value not in get_args(wanted):
            allowed = ", ".join(map(repr, get_args(wanted)))
            raise PolicyError(f"policy '{policy}': parameter {key}={value!r} is not one of {allowed}")
        return value
    kind = getattr(wanted, "__name__", str(wanted))
    try:
        if wanted is bool:
            return value if isinstance(value, bool) else {"true": True, "false": False}[str(value).lower()]
        if wanted in (int, float):
            if isinstance(value, bool) or (wanted is int and isinstance(value, float) and value != int(value)):
                raise ValueError
            return wanted(value)
    except (ValueError, KeyError, TypeError):
        raise PolicyError(f"policy '{policy}': parameter {key}={value!r} is not of type {kind}") from None
    return value


def _line(error: BaseException) -> str:
    """An exception on one line."""
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
