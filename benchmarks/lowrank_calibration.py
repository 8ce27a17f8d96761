"""How much DynaCalKV's ranks and groups depend on the calibration text, and what it and ReCalKV lose at equal bytes.

    python benchmarks/lowrank_calibration.py [--model smollm2-135m] [--length 8192] [--rank 0.5] [--context 0]

One calibration text is recorded; fits on the first 1, 4, 16 pieces of it, on short pieces, and on 16 pieces of another
text are compared with the fit on 16 pieces of 512 tokens. Moved: half the sum of differences of ranks over the pool, 0
is the same split, 1 another one altogether. Groups: layers whose key heads are grouped otherwise. Values: share of the
value ranks in the pool.

With --context a question text of that length is replayed as well, under every fit (what its sensitivity comes to) and
under both groupings, at equal cached bytes (ceiling=elements against ReCalKV's uniform groups, all of one rank) and the
paper's way (equal parameters of the thin projections): mean KL to dense on answers, and bytes held.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvassay.experiment.calibrate import calibration_sample
from kvassay.experiment.plan import options_for
from kvassay.experiment.schema import CalibrationTable
from kvassay.policy.base import Artefact, Policy
from kvassay.policy.budget import Protection
from kvassay.policy.card import Prefill
from kvassay.policy.registry import make, parse
from kvassay.record.load import LoadedModel, load
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.replay.arms import Arm
from kvassay.replay.calibration import TraceCalibration
from kvassay.replay.closed import Replay, replay_trace
from kvassay.replay.protocol import Protocol
from kvassay.trace.reader import Trace
from kvassay.workload.registry import build

PIECES = ((16, 512), (4, 512), (1, 512), (16, 128), (64, 128))


def ranks(artefact: Artefact) -> dict[str, int]:
    """Rank of every key and value matrix, a layer's key groups together."""
    found: dict[str, int] = {}
    for name, tensor in artefact.tensors.items():
        layer, part, *_ = name.split(".")
        if part in ("key", "value"):
            found[f"{layer} {part}"] = found.get(f"{layer} {part}", 0) + tensor.shape[1]
    return found


def groups(artefact: Artefact) -> dict[str, list[int]]:
    """Group of every key head, by layer."""
    return {n.split(".")[0]: t.tolist() for n, t in artefact.tensors.items() if n.endswith(".groups")}


def moved(one: Mapping[str, int], other: Mapping[str, int]) -> float:
    """Share of the pool that lies elsewhere."""
    return sum(abs(one[name] - other[name]) for name in one) / (sum(one.values()) + sum(other.values()))


def sensitivity(loaded: LoadedModel, texts: tuple[Trace, Trace], rank: float, test: Trace | None) -> Table:
    """One row per fit, against the first; with a test text what it loses there, prefilled by itself."""
    table = Table("text", "pieces", "tokens each", "fit, s", "moved", "groups", "values", "KL to dense, nats")
    first: Artefact | None = None
    for text, (samples, tokens) in [*((0, pieces) for pieces in PIECES), (1, PIECES[0])]:
        policy = make("dynacalkv", rank=rank, samples=samples, tokens=tokens, group=1)
        start = time.perf_counter()
        found = policy.fit(TraceCalibration(texts[text], policy, loaded.model))
        seconds = time.perf_counter() - start
        kl = "-" if test is None else f"{lost(loaded, test, policy, found):.4f}"
        first = first or found
        mine, theirs = ranks(found), ranks(first)
        values = sum(r for name, r in mine.items() if name.endswith("value")) / sum(mine.values())
        other = sum(group != groups(first)[layer] for layer, group in groups(found).items())
        had = max(1, min(samples, texts[text].prefix.tokens // tokens))
        cells = (f"{seconds:.0f}", f"{moved(mine, theirs):.3f}", f"{other}/{len(groups(found))}", f"{values:.2f}")
        row = ("AB"[text], str(had), str(tokens), *cells, kl)
        table.add_row(*row)
        print(*row, sep=" | ", file=sys.stderr)
    return table


def lost(loaded: LoadedModel, test: Trace, policy: Policy, artefact: Artefact) -> float:
    """Mean KL to dense on the answers of a text whose prefill the method takes part in."""
    plain = Protection(0, 0)
    arms = [Arm(make("dense"), None, plain), Arm(policy, None, plain, prefill=Prefill.OWN)]
    replay = Replay(loaded, test, arms, Protocol(free_tokens=0), {policy.label: artefact})
    lanes = [replay.compressed(arm) for arm in arms]
    rows = [row for number, branch in enumerate(test.branches) for row in replay.ask(number, branch, lanes)]
    mine = [row.kl for row in rows if row.arm == arms[1].label]
    return sum(mine) / len(mine)


def recorded(loaded: LoadedModel, folder: Path, policies: Sequence[Policy], context: int) -> Trace:
    """The test text, with the evidence that all policies need."""
    sample = build("needle_multikey", loaded.tokenizer, context, seed=1, questions=2)
    return record_sample(loaded, sample, folder / "test", options_for(policies, RecordOptions()))


def compared(rank: float) -> list[Policy]:
    """Both groupings at one rank, and the plain baseline."""
    named = [f"{text}, rank={rank})" for text in ("recalkv(group=1", "dynacalkv(group=1", "dynacalkv(ceiling=elements")]
    named += [f"recalkv(rank={rank})", f"svd(rank={rank})"]
    return [parse(text) for text in named]


def replayed(loaded: LoadedModel, trace: Trace, calibration: Trace, policies: Sequence[Policy]) -> Table:
    """Forked, and prefilled by themselves."""
    plain = Protection(0, 0)
    arms = [Arm(make("dense"), None, plain), *(Arm(policy, None, plain) for policy in policies)]
    arms += [Arm(policy, None, plain, prefill=Prefill.OWN) for policy in policies]
    rows = replay_trace(loaded, trace, arms, Protocol(free_tokens=0), calibration=calibration)
    table = Table("arm", "KL to dense, nats", "held / dense, layers in scope")
    for arm in arms:
        mine = [row for row in rows if row.arm == arm.label]
        kl, held = (sum(getattr(r, name) for r in mine) / len(mine) for name in ("kl", "retained_fraction_scope"))
        table.add_row(arm.label, f"{kl:.4f}", f"{held:.3f}")
    return table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rank", type=float, default=0.5)
    parser.add_argument("--context", type=int, default=0)
    given = parser.parse_args()
    loaded, console = load(given.model), Console()
    with tempfile.TemporaryDirectory() as folder:
        texts = tuple(
            record_sample(
                loaded,
                calibration_sample(loaded, CalibrationTable(length=given.length, seed=seed)),
                Path(folder) / f"text-{seed}",
                RecordOptions(),
            )
            for seed in (0, 1)
        )
        policies = compared(given.rank)
        test = recorded(loaded, Path(folder), policies, given.context) if given.context else None
        console.print(sensitivity(loaded, (texts[0], texts[1]), given.rank, test))
        if test is not None:
            console.print(replayed(loaded, test, texts[0], policies))


if __name__ == "__main__":
    main()
