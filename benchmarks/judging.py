"""How long judging takes: statistics and checks of 100 arms x 1,000 questions from hand-made rows.

python benchmarks/judging.py [--arms 100] [--contexts 125] [--questions 8]
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from kvassay.measure.aggregate import aggregate
from kvassay.measure.checks import ArmFacts, SetFacts
from kvassay.measure.inspect import inspect
from kvassay.measure.result import RECLAIM_MODES, BranchResult
from kvassay.policy.budget import Protection

LIMIT_SECONDS = 5.0
"""What 100 arms x 1,000 questions may take."""


def made_up(arms: int, contexts: int, questions: int, seed: int = 0) -> list[BranchResult]:
    """Rows of `arms` arms, dense and dense' among them; quality differs by arm, context and question."""
    rng = np.random.default_rng(seed)
    labels = ["dense", "dense'", *(f"policy{n} keep=0.25" for n in range(arms - 2))]
    hard = rng.normal(size=contexts)
    rows = []
    for place, label in enumerate(labels):
        lost = 0.0 if place < 2 else 0.02 * place
        for context in range(contexts):
            for branch in range(questions):
                nll = float(np.exp(0.3 * hard[context] + 0.1 * rng.normal()) + lost)
                right = float(rng.random() < np.exp(-nll))
                rows.append(_row(label, f"context{context}", branch, nll, right, lost))
    return rows


def _row(arm: str, trace: str, branch: int, nll: float, right: float, lost: float) -> BranchResult:
    fraction = 1.0 if lost == 0 else 0.25
    return BranchResult(
        trace=trace, workload="kv_short", branch=branch, arm=arm, query_aware=False,
        context_tokens=2048, question_tokens=6, answer_tokens=4,
        nll=nll, top1=right, kl=lost * nll, agree=1 - lost / 4, task=right, divergence=None, wrong_step=None,
        generated=f"{nll:.3f}", generated_tokens=6,
        retained_bytes=fraction * 1e6, retained_fraction=fraction, retained_bytes_scope=fraction * 1e6,
        retained_fraction_scope=fraction, peak_bytes=1e6, selected_tokens=fraction * 2048, blocks_total=128,
        blocks_freed=dict.fromkeys(RECLAIM_MODES, 96.0), read_bytes=fraction * 1e6, read_fraction=fraction,
    )  # fmt: skip


def main() -> None:
    """Time `aggregate` and `inspect` once; the scipy import is part of it, as it is in a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", type=int, default=100)
    parser.add_argument("--contexts", type=int, default=125)
    parser.add_argument("--questions", type=int, default=8)
    chosen = parser.parse_args()
    rows = made_up(chosen.arms, chosen.contexts, chosen.questions)
    start = time.perf_counter()
    found = aggregate(rows)
    seconds = time.perf_counter() - start
    facts = SetFacts(
        arms={cell.arm: ArmFacts(cell.arm, cell.arm.partition(" ")[0]) for cell in found.cells},
        contexts=[], query_aware=False, free_tokens=16, block_size=16, protection=Protection(),
    )  # fmt: skip
    start = time.perf_counter()
    findings = inspect(rows, found.cells, facts)
    checking = time.perf_counter() - start
    print(
        f"{len(found.cells)} arms x {found.cells[0].samples} questions on {found.cells[0].contexts} contexts: "
        f"statistics in {seconds:.2f} s (limit {LIMIT_SECONDS:g} s), checks in {checking:.2f} s, "
        f"{len(findings)} findings"
    )


if __name__ == "__main__":
    main()
