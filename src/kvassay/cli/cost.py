"""`kvassay cost`: modelled decode time of a model at any context, batch and hardware."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kvassay.cli.params import TokenCount


@click.command("cost")
@click.argument("model", metavar="NAME|PATH")
@click.option("--context", "contexts", type=TokenCount(), multiple=True, help="Tokens, e.g. 32k; repeatable.")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(1), help="Requests decoding together.")
@click.option(
    "--hardware", "machines", multiple=True, metavar="NAME|FILE", help="Shipped name or a .toml; repeatable.  [all]"
)
@click.option(
    "--parameters",
    type=click.FloatRange(0),
    help="Weights read per token, e.g. 8e9 (of a mixture of experts, the active ones); 0 leaves them out.  "
    "[the registry's number, else not counted]",
)
@click.option("--calibrate", type=click.Path(path_type=Path), help="Run folder whose measured times calibrate.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def cost(
    model: str,
    contexts: tuple[int, ...],
    batch: int,
    machines: tuple[str, ...],
    parameters: float | None,
    calibrate: Path | None,
    as_json: bool,
) -> None:
    """Model the decode time of a model's cache: a roofline per component, dense, on the given hardware.

    NAME|PATH is a model of the registry (kvassay inspect lists them), a config.json or its folder, or a
    Hugging Face id that is in the local cache. Nothing is measured; every number is labelled modelled.
    """
    from rich.console import Console

    from kvassay.layout.config import from_config
    from kvassay.layout.registry import rows
    from kvassay.layout.render import DEFAULT_CONTEXTS
    from kvassay.measure.cost import Weights
    from kvassay.measure.hardware.files import load_hardware, shipped
    from kvassay.report.cost import cost_report, cost_tables

    layout = from_config(model)
    found = [load_hardware(name) for name in machines or shipped()]
    weights = Weights(parameters, layout.kv_dtype) if parameters else None
    row = rows.find(model)
    if parameters is None and row and row.parameters and row.parameters.active:
        weights = Weights(row.parameters.active, layout.kv_dtype, row.parameters.source)
    calibrations = {}
    if calibrate is not None:
        from kvassay.experiment.costs import calibrations_of

        calibrations = calibrations_of(calibrate, found)
    report = cost_report(
        layout, model, contexts or DEFAULT_CONTEXTS, found, batch=batch, weights=weights, calibrations=calibrations
    )
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        Console(soft_wrap=False).print(cost_tables(report))
