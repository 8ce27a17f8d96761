"""Which layers EpiKV's calibration points to, and how far that depends on the text, the window and the pieces.

    python benchmarks/epikv_calibration.py [--model smollm2-135m] [--workload prose] [--texts 3] [--tokens 512]

One row per fit: the layer of highest and of lowest rank correlation, both correlations, and the rank correlation of all
layers' values with those of the first row. A method whose layers move with the text has not found them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from torch import Tensor

from kvassay.experiment.calibrate import calibration_sample
from kvassay.experiment.schema import CalibrationTable
from kvassay.policy.registry import make
from kvassay.record.load import load
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.replay.calibration import TraceCalibration

VARIANTS = ({}, {"window": 16}, {"piece": 16, "stride": 8}, {"piece": 64, "stride": 32})


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--workload", default="prose")
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512)
    given = parser.parse_args()
    loaded = load(given.model)
    table = Table("text", "window", "piece", "early", "rho", "late", "rho", "with first", "seconds")
    first: Tensor | None = None
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.texts):
            wanted = CalibrationTable(length=given.tokens, seed=seed, workload=given.workload)
            sample = calibration_sample(loaded, wanted)
            trace = record_sample(loaded, sample, Path(folder) / f"text-{seed}", RecordOptions())
            for changed in VARIANTS if seed == 0 else VARIANTS[:1]:
                policy = make("epikv", tokens=given.tokens, **changed)
                start = time.perf_counter()
                found = policy.fit(TraceCalibration(trace, policy, loaded.model)).tensors
                seconds, rho = time.perf_counter() - start, found["rho"]
                first = rho if first is None else first
                named = policy.parameters
                layers = [f(rho, i) for i in (int(found["early"]), int(found["late"])) for f in (_layer, _value)]
                alike = f"{spearmanr(rho.numpy(), first.numpy()).statistic:.2f}"
                table.add_row(str(seed), str(named["window"]), str(named["piece"]), *layers, alike, f"{seconds:.0f}")
    Console().print(table)


def _layer(rho: Tensor, at: int) -> str:
    return f"{at}/{len(rho)}"


def _value(rho: Tensor, at: int) -> str:
    return f"{float(rho[at]):+.3f}"


if __name__ == "__main__":
    main()
