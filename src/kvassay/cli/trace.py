"""`kvassay trace`: look at, check, re-block, fingerprint and record again the traces on disk."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Literal

import click

from kvassay.cli.params import engine_option

BIG = 256 << 20
"""Bytes from which `verify` shows its progress."""
folder = click.Path(path_type=Path)


@click.group("trace")
def trace() -> None:
    """Recorded traces: show, verify, reblock, fingerprint, reproduce; and KV events of an engine."""


@trace.command()
@click.argument("path", type=folder)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def show(path: Path, as_json: bool) -> None:
    """Say what a trace holds: model, tokens, layers, bytes, evidence, branches."""
    from rich.console import Console

    from kvassay.trace.reader import Trace
    from kvassay.trace.render import summary, tables

    opened = Trace.open(path)
    if as_json:
        click.echo(json.dumps(summary(opened), indent=1))
    else:
        Console().print(tables(opened), markup=False, highlight=False)


@trace.command()
@click.argument("path", type=folder)
def verify(path: Path) -> None:
    """Read every byte: hashes, shapes, finite values, token ids, selections, block tables and their events."""
    from rich.console import Console
    from rich.progress import Progress

    from kvassay.errors import TraceError
    from kvassay.record.derivation import underived
    from kvassay.trace.reader import Trace
    from kvassay.trace.verify import verify as check

    total = sum(entry.bytes for entry in Trace.open(path).header.shards.values())
    with Progress(console=Console(stderr=True), disable=total < BIG, transient=True) as progress:
        bar = progress.add_task("verifying", total=total)
        report = check(path, lambda count: progress.advance(bar, count), [underived])
    for problem in report.problems:
        click.echo(problem)
    if not report.ok:
        raise TraceError(f"{path}: {len(report.problems)} problems found")
    tables = ", ".join(report.overlays) or "none"
    click.echo(f"{path}: sound; {report.shards} shards, {report.bytes} bytes; block tables: {tables}")


@trace.command()
@click.argument("path", type=folder)
@click.option("--block-size", type=click.IntRange(min=1), required=True, help="Tokens per block.")
@click.option("--name", help="Name of the overlay.  [default: block_<size>]")
@click.option("--overwrite", is_flag=True, help="Replace an overlay of that name.")
def reblock(path: Path, block_size: int, name: str | None, overwrite: bool) -> None:
    """Lay contiguous block tables of another block size over a trace; its tensors stay as they are."""
    from kvassay.trace.reader import Trace

    click.echo(Trace.open(path).reblock(block_size, name, overwrite=overwrite))


@trace.command()
@click.argument("path", type=folder)
@click.option("-o", "--output", type=folder, required=True, help="File to write.")
def fingerprint(path: Path, output: Path) -> None:
    """Write the recipe of a trace with its fingerprint: small enough to commit, enough to `reproduce`."""
    from kvassay.trace.fingerprint import save_recipe
    from kvassay.trace.reader import Trace

    save_recipe(Trace.open(path), output)
    click.echo(output)


@trace.command()
@click.argument("source", type=folder)
@click.option("--tolerance", type=click.FloatRange(min=0), help="Allowed part of a tensor's norm.  [default: 0.001]")
@click.option("--keep", type=folder, help="Keep the new recording here.")
@click.option("--model", help="Where the model is, if not under the name it was recorded by: a folder, say.")
@engine_option
def reproduce(source: Path, tolerance: float | None, keep: Path | None, model: str | None, engine: str) -> None:
    """Record SOURCE (a trace or a recipe file) again, and compare fingerprints.

    Whichever engine recorded SOURCE: both must find the same rows.
    """
    from kvassay.errors import RecordError
    from kvassay.record.again import rerecord
    from kvassay.trace.fingerprint import TOLERANCE, compare, load_recipe
    from kvassay.trace.fingerprint import fingerprint as take

    header, expected = load_recipe(source)
    limit = TOLERANCE if tolerance is None else tolerance
    with tempfile.TemporaryDirectory(prefix="kvassay-") as scratch:
        target = keep if keep is not None else Path(scratch) / "again"
        if engine == "vllm":
            from kvassay.record.vllm.again import rerecord_in_vllm as record_again
        else:
            record_again = rerecord
        again = record_again(header, target, model=model)
        differences = compare(expected, take(again), limit)
    for line in differences:
        click.echo(line)
    if differences:
        raise RecordError(f"{source}: not reproduced: {len(differences)} differences beyond {limit:g}")
    click.echo(f"{source}: reproduced within {limit:g}")


@trace.command("from-vllm")
@click.argument("capture", type=folder)
@click.option("--out", type=folder, required=True, help="Folder for the trace folders.")
@click.option("--model", help="Where the model is, if not where the server had it.")
@click.option(
    "--share",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    help="Requests whose prompts share this part of the shorter one go into one trace.",
)
@click.option("--overwrite", is_flag=True, help="Replace traces that are there.")
def from_vllm(capture: Path, out: Path, model: str | None, share: float, overwrite: bool) -> None:
    """Make traces of what a vLLM server did: CAPTURE is the folder that KVASSAY_VLLM_RECORD named."""
    from kvassay.record.vllm.capture import Capture
    from kvassay.record.vllm.served import served_traces

    click.echo(Capture(capture).cost(), err=True)
    for made in served_traces(capture, out, model=model, share=share, overwrite=overwrite):
        click.echo(made.path)


@trace.command("kv-events")
@click.argument("stream", type=folder)
@click.option(
    "--on-gap",
    type=click.Choice(["refuse", "forget"]),
    default="refuse",
    show_default=True,
    help="When messages are missing: fail, or start again from an empty cache.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def kv_events(stream: Path, on_gap: Literal["refuse", "forget"], as_json: bool) -> None:
    """Rebuild an engine's prefix cache from a saved STREAM of its KV events (`kv-listen` saves one)."""
    from rich.console import Console

    from kvassay.trace.kv_events.frames import read_frames
    from kvassay.trace.kv_events.index import rebuild
    from kvassay.trace.kv_events.render import index_data, index_tables

    index = rebuild(read_frames(stream), str(stream), on_gap)
    if as_json:
        click.echo(json.dumps(index_data(index), indent=1))
    else:
        Console().print(index_tables(index), markup=False, highlight=False)


@trace.command("kv-listen")
@click.argument("endpoint")
@click.option("-o", "--output", type=folder, required=True, help="File to write.")
@click.option("--topic", default="", help="Only messages of this topic.")
@click.option(
    "--quiet-for", "seconds", default=10.0, show_default=True, help="Stop after so many seconds without a message."
)
def kv_listen(endpoint: str, output: Path, topic: str, seconds: float) -> None:
    """Save the KV events that a vLLM engine publishes at a ZMQ ENDPOINT, such as tcp://host:5557 or ipc://PATH."""
    from kvassay.trace.kv_events.frames import listen, save_frames

    click.echo(f"{output}: {save_frames(output, listen(endpoint, seconds, topic))} messages")
