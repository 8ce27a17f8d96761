"""`kvassay serve-replay`: a request trace under pool pressure, with a policy's measured footprint."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvassay.cli.params import ByteCount, TokenCount

if TYPE_CHECKING:
    from kvassay.replay.serving.footprint import Timing

path = click.Path(path_type=Path)
at_least_one = click.IntRange(1)
above_zero = click.FloatRange(0, min_open=True)


@click.command("serve-replay")
@click.argument("requests", type=path)
@click.option("--model", required=True, help="Embedded model, config.json or its folder, cached Hugging Face id.")
@click.option("--pool-bytes", required=True, type=ByteCount(), help="KV cache memory, e.g. 40GiB.")
@click.option(
    "--footprint",
    "sources",
    multiple=True,
    type=path,
    help="Run folder, or TOML of stated ones.",
)
@click.option("--arm", "arms", multiple=True, help="Only this arm of them; repeatable.")
@click.option("--mode", default="whole_block", show_default=True, help="How the engine takes blocks back.")
@click.option(
    "--timing", type=click.Choice(["after_prefill", "from_start"]), help="When bytes shrink.  [default: as run]"
)
@click.option("--set", "trace_set", help="Trace set of the run.  [default: its longest]")
@click.option("--backend", default="ours", show_default=True, type=click.Choice(["ours", "vllm"]))
@click.option("--hardware", default="h200", show_default=True, help="Hardware file for modelled step times.")
@click.option("--parameters", type=above_zero, help="Weights that take part in a token, e.g. 8e9.  [default: a guess]")
@click.option("--step-overhead", default=0.0, type=click.FloatRange(0), help="Seconds added to every step.")
@click.option("--times", type=path, help="TOML of measured coefficients in place of the roofline.")
@click.option("--block-size", type=at_least_one, help="Tokens per block.  [default: the trace's]")
@click.option("--batched-tokens", default=8192, show_default=True, type=at_least_one, help="Tokens per step at most.")
@click.option("--max-requests", default=256, show_default=True, type=at_least_one, help="Running at once at most.")
@click.option("--max-tokens", type=TokenCount(), help="Longest prompt and answer together.")
@click.option("--speedup", default=1.0, show_default=True, type=above_zero, help="Arrivals come so many times faster.")
@click.option("--count", type=at_least_one, help="Only the first requests.")
@click.option("--ttft", type=above_zero, help="Limit in seconds for a request to be in time.")
@click.option("--tpot", type=above_zero, help="Limit in seconds per token after the first.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def serve_replay(
    requests: Path,
    model: str,
    pool_bytes: int,
    sources: tuple[Path, ...],
    arms: tuple[str, ...],
    mode: str,
    timing: Timing | None,
    trace_set: str | None,
    backend: str,
    hardware: str,
    parameters: float | None,
    step_overhead: float,
    times: Path | None,
    block_size: int | None,
    batched_tokens: int,
    max_requests: int,
    max_tokens: int | None,
    speedup: float,
    count: int | None,
    ttft: float | None,
    tpot: float | None,
    as_json: bool,
) -> None:
    """Serve REQUESTS dense and under each footprint: admission, hits, latency, goodput, occupancy.

    Continuous batching with chunked prefill and preemption over a paged pool with prefix caching. No model runs:
    step times are modelled, footprints and correctness come from a run. Whether an engine admits and shares
    correctly is not judged.
    """
    from kvassay.cache.reclaim import MODES
    from kvassay.errors import ExperimentError, did_you_mean
    from kvassay.experiment.footprints import load_footprints, load_times
    from kvassay.layout.config import from_config
    from kvassay.measure.cost import Weights
    from kvassay.measure.hardware.files import load_hardware
    from kvassay.replay.serving.cost import estimated_parameters
    from kvassay.replay.serving.result import Targets
    from kvassay.replay.serving.scheduler import Limits
    from kvassay.replay.serving.serve import Setting, compare
    from kvassay.report.serving import serving_data, serving_tables
    from kvassay.report.table import console_for
    from kvassay.trace.files import sha256_file
    from kvassay.trace.requests.formats import open_requests

    if mode not in MODES:
        raise ExperimentError(f"no reclaim mode '{mode}'{did_you_mean(mode, MODES)}")
    layout = from_config(model)
    setting = Setting(
        layout=layout,
        pool_bytes=pool_bytes,
        hardware=load_hardware(hardware),
        weights=Weights(parameters or estimated_parameters(layout)),
        block_size=block_size,
        limits=Limits(batched_tokens, max_requests, max_tokens),
        targets=Targets(ttft, tpot),
        backend="vllm" if backend == "vllm" else "ours",
        table=None if times is None else load_times(times),
        step_overhead=step_overhead,
        speedup=speedup,
        count=count,
    )
    found = load_footprints(sources, mode, arms, trace_set, timing)
    comparison = compare(open_requests(requests), setting, found)
    if as_json:
        about = {
            "requests": requests.name,
            "requests_sha256": sha256_file(requests),
            "count": count,
            "model": model,
            "pool_bytes": pool_bytes,
            "hardware": hardware,
            "parameters": setting.weights.parameters,
            "parameters_how": "given" if parameters else "estimated from the layout",
            "speedup": speedup,
        }
        click.echo(json.dumps(serving_data(comparison, about), indent=1))
    else:
        console_for(sys.stdout).print(serving_tables(comparison), markup=False)
