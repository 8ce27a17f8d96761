"""`kvassay record --engine vllm`: its options, and what it prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvassay.errors import RecordError
from kvassay.record.vllm.limits import parse_indices, parse_steps

if TYPE_CHECKING:
    from kvassay.record.options import RecordOptions
    from kvassay.workload.sample import Sample

OWN = ("block_size", "generate", "layers", "kv_heads", "steps")
"""Names of the options that only this engine has."""


def _read(parse: Callable[[str], Any], form: str) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    def callback(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
        if text is None:
            return None
        try:
            return parse(text)
        except ValueError:
            raise click.BadParameter(f"'{text}' is not {form}", ctx, param) from None

    return callback


def vllm_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `OWN` to a command."""
    indices = _read(parse_indices, "a list of indices such as 0,5,8-11")
    steps = _read(parse_steps, "a range of steps such as 200 or 0:200")
    size = "vLLM: tokens per block, on a CPU a multiple of 32."
    for option in (
        click.option("--steps", callback=steps, help="vLLM: so many engine steps; what comes later is left out."),
        click.option("--kv-heads", callback=indices, help="vLLM: these KV heads only, with their query heads, as 0,2."),
        click.option("--layers", callback=indices, help="vLLM: these layers only, as 0,5,8-11."),
        click.option("--generate", type=click.IntRange(1), help="vLLM: so many answer tokens of the model's, greedy."),
        click.option("--block-size", type=click.IntRange(1), help=f"{size}  [default: 128]"),
    ):
        command = option(command)
    return command


def refuse_for_transformers(given: dict[str, Any]) -> None:
    """`RecordError` if an option of `OWN` was given for the other engine."""
    for name in OWN:
        if given[name] is not None:
            raise RecordError(f"--{name.replace('_', '-')} is vLLM's alone: add --engine vllm, or leave it out")


def record_with_vllm(
    model: str,
    make: Callable[[Any, int], Sample],
    folders: list[Path],
    options: RecordOptions,
    given: dict[str, Any],
    device: str,
    overwrite: bool,
) -> None:
    """Record `make(tokenizer, index)` into each folder; overhead and size go to standard error."""
    from kvassay.record.load import describe
    from kvassay.record.vllm.offline import VllmOptions, check_importable, check_options, record_samples

    check_importable()
    check_options(options)
    if device != "cpu":
        raise RecordError(f"--device {device}: with vLLM this records on the CPU; for a GPU, record a running server")
    own = VllmOptions(**{name: value for name, value in given.items() if value is not None})
    files = describe(model)
    samples = [(make(files.tokenizer, index), folder) for index, folder in enumerate(folders)]
    for done in record_samples(files, samples, options, own, overwrite=overwrite):
        tokens = sum(segment.tokens for segment in done.trace.segments)
        size = sum(entry.bytes for entry in done.trace.header.shards.values())
        sizes = f"trace {size / 2**20:.1f} MiB, {size / tokens / 1024:.1f} KiB per token"
        click.echo(f"{done.cost}, {sizes}", err=True)
        click.echo(done.trace.path)
