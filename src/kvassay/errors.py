"""The typed errors of every room.

A message names the file, key or number that is wrong and what is allowed, on one line:
the command line prints it as it is and exits with status 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KvassayError(Exception):
    """Base of every error that is the input's fault, not the program's."""


class LayoutError(KvassayError):
    """A model configuration cannot be turned into a cache layout."""


class UnsupportedModel(LayoutError):
    """The model keeps state that is not a KV cache, or is of an unknown type: refused, never guessed."""


class CacheError(KvassayError):
    """A request the block pool or ledger cannot honour."""


class PoolExhausted(CacheError):
    """More blocks were asked for than are free."""


class IllegalEdit(CacheError):
    """An edit breaks a law of the cache: shape, ownership, protection, uncommitted tokens, empty result."""


class LedgerCorrupt(CacheError):
    """`check()` found a broken invariant; the numbers are in the message."""


class KernelError(KvassayError):
    """There is no attention kernel for a device, or none for data of this form."""


class TraceError(KvassayError):
    """A trace folder is missing, truncated, of another schema version, or not what its hashes say."""


class PolicyError(KvassayError):
    """A policy broke the contract, or is unknown, or got a parameter it does not have."""


class EvidenceMissing(PolicyError):
    """A policy asks for evidence that it did not declare or that the trace does not hold."""


class BudgetError(PolicyError):
    """A budget is empty, negative, or names no unit."""


class WorkloadError(KvassayError):
    """A workload cannot be generated at this length, or its prompt fails a check."""


class ModelError(KvassayError):
    """A model cannot be fetched, verified, converted or loaded."""


class RecordError(KvassayError):
    """A recording cannot be made or reproduced."""


class ExperimentError(KvassayError):
    """An experiment file or run folder is wrong."""


class DoesNotFit(KvassayError):
    """A run's modelled memory is more than a device has free; the bytes of both are in the message."""


class HardwareError(KvassayError):
    """A hardware file is unknown, wrong, or says nothing of what is asked."""


class GateError(KvassayError):
    """A gate file is wrong or was changed after results existed."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest known name, else the known names.

    A name of which the given one is the beginning, up to a hyphen, is nearest: h100 means h100-sxm, not h200.
    """
    names = sorted(known)
    begun = [one for one in names if one.startswith(f"{name}-")]
    near = begun or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" (did you mean '{near[0]}'?)" if near else f" (known: {', '.join(names)})"
