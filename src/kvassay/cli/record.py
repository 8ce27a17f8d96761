"""`kvassay record`: contexts of a workload through a model, into traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvassay.cli.params import TokenCount, engine_option
from kvassay.cli.record_vllm import OWN, record_with_vllm, refuse_for_transformers, vllm_options
from kvassay.errors import RecordError

TAPS = {
    "output": "attention output",
    "lse": "row log-sum-exp",
    "hidden": "residual stream entering a layer",
    "layer_input": "what q, k and v read",
    "bucket": "scores inside a query's own bucket",
}


def _parameters(ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]) -> dict[str, Any]:
    """`keys=8` -> {"keys": 8}; values are JSON where they can be, else text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not (key and sign):
            raise click.BadParameter(f"'{pair}' is not KEY=VALUE", ctx, param)
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


@click.command()
@click.argument("model")
@click.option("--workload", required=True, help="Name of a workload (see `kvassay workloads`).")
@click.option("--context", type=TokenCount(), default="2k", show_default=True, help="Context length in tokens.")
@click.option("--count", type=click.IntRange(1), default=1, show_default=True, help="How many contexts.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the workload.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the trace folders.")
@click.option("--param", "params", multiple=True, callback=_parameters, help="KEY=VALUE of the workload; repeatable.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option(
    "--prefill-chunk", type=click.IntRange(1), default=512, show_default=True, help="Tokens per forward pass."
)
@click.option(
    "--q-tail",
    type=click.IntRange(0),
    default=64,
    show_default=True,
    help="Queries kept of the last so many context tokens: what snapkv and the like may look at. Questions keep all.",
)
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    help="Of stored rows: float32, or float16 (half the size; the trace is then its own reference).",
)
@click.option(
    "--tap",
    "taps",
    multiple=True,
    help=f"Extra evidence: {'; '.join(f'{k} ({v})' for k, v in TAPS.items())}. Repeatable.",
)
@click.option(
    "--tap-layer", "tap_layers", multiple=True, type=click.IntRange(0), help="Only of this layer; repeatable."
)
@click.option("--bucket", type=click.IntRange(1), default=32, show_default=True, help="Positions per bucket.")
@click.option(
    "--logits",
    default="topk",
    show_default=True,
    help="Of the questions and answers: full rows, topk, or none (greedy ids and margins stay).",
)
@click.option("--logits-k", type=click.IntRange(2), default=64, show_default=True, help="How many for topk.")
@engine_option
@vllm_options
@click.option("--beyond-native", is_flag=True, help="Allow more tokens than the model's native context.")
@click.option("--overwrite", is_flag=True, help="Replace traces that are there.")
def record(
    model: str,
    workload: str,
    context: int,
    count: int,
    seed: int,
    out: Path,
    params: dict[str, Any],
    device: str,
    overwrite: bool,
    beyond_native: bool,
    tap_layers: tuple[int, ...],
    engine: str,
    **recording: Any,
) -> None:
    """Record COUNT contexts of a workload, with their questions, under MODEL.

    MODEL is an embedded model, a folder or a Hugging Face id. Prints one trace folder per line. Interrupted, it is
    continued by the same command: what is whole is kept.
    """
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from kvassay.experiment.memory import recording_need
    from kvassay.record.again import check_same_recording
    from kvassay.record.load import describe, load, torch_device
    from kvassay.record.options import RecordOptions, make_header
    from kvassay.record.transformers import record_sample
    from kvassay.workload.registry import build, get
    from kvassay.workload.sample import Sample

    get(workload)  # refuse a wrong name before the model is loaded
    vllm = {name: recording.pop(name) for name in OWN}
    options = RecordOptions(allow_beyond_native=beyond_native, tap_layers=tap_layers or None, **recording)
    folders = [out / f"{workload}-{context}-s{seed}-{index:03d}" for index in range(count)]
    if engine == "vllm" and not overwrite and (there := [folder for folder in folders if folder.exists()]):
        raise RecordError(f"{there[0]}: exists already; pass --overwrite or another --out")

    def make(tokenizer: Any, index: int) -> Sample:
        return build(workload, tokenizer, context, seed=seed, index=index, **params)

    if engine == "vllm":
        record_with_vllm(model, make, folders, options, vllm, device, overwrite)
        return
    refuse_for_transformers(vllm)
    torch_device(device)
    files = describe(model)
    need = recording_need(model, files.layout, context, options.prefill_chunk, device)
    click.echo(need.line, err=True)
    need.check()
    loaded = load(model, device=device)
    with Progress(console=Console(stderr=True), transient=True) as bars:
        for index, folder in enumerate(folders):
            sample = make(loaded.tokenizer, index)
            if folder.exists() and not overwrite:
                check_same_recording(folder, make_header(loaded, sample, options))
                click.echo(f"{folder}: holds this recording already", err=True)
                click.echo(folder)
                continue
            bar = bars.add_task(folder.name, total=None)

            def show(done: int, total: int, bar: TaskID = bar) -> None:
                bars.update(bar, completed=done, total=total)

            record_sample(loaded, sample, folder, options, show, overwrite=overwrite)
            bars.remove_task(bar)
            click.echo(folder)
