"""`kvassay fidelity`: policies screened on a trace's recorded queries, without a model."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("fidelity")
@click.argument("trace", type=click.Path(path_type=Path), metavar="TRACE|RUN")
@click.option("--policy", "policies", multiple=True, help="Policy with parameters; repeatable. Not with a run.")
@click.option(
    "--budget", "budgets", multiple=True, default=["keep=0.25"], show_default=True, help="Tokens kept; repeatable."
)
@click.option("--sink", default=4, show_default=True, type=click.IntRange(0), help="First tokens never evicted.")
@click.option("--recent", default=32, show_default=True, type=click.IntRange(0), help="Last tokens never evicted.")
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(1), help="Tokens per block.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of random policies.")
@click.option("--calibration", type=click.Path(path_type=Path), help="Trace of other text, for svd and the like.")
@click.option("--alone", is_flag=True, help="Leave out the yardsticks (dense, random, recency, hindsight, ...).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON with every branch and layer instead of a table.")
def fidelity(
    trace: Path,
    policies: tuple[str, ...],
    budgets: tuple[str, ...],
    sink: int,
    recent: int,
    block_size: int,
    seed: int,
    calibration: Path | None,
    alone: bool,
    as_json: bool,
) -> None:
    """Screen policies on TRACE, a recorded trace folder: attention-output error and retained mass.

    Needs no model and no second of decoding, and says nothing about answers: a policy that fails here is not worth
    a run, one that passes still has to be run. Policies that decide again at every step are listed as not replayed.

    Of a finished RUN folder it screens the run's own arms on the first context of every workload, writes
    RUN/fidelity.parquet (error by layer and head) and the report anew. Run it where the run's policy files are found.
    """
    from rich.console import Console

    from kvassay.experiment.folder import MANIFEST
    from kvassay.experiment.results import refuse_long_only

    refuse_long_only(trace, "no recorded contexts to screen")
    if (trace / MANIFEST).is_file():
        if policies:
            raise click.UsageError(f"{trace} is a run folder: its own arms are screened, --policy is for a trace")
        _screen_run(trace)
        return
    if not policies:
        raise click.UsageError("Missing option '--policy'.")

    from kvassay.experiment.screen import screen_trace
    from kvassay.policy.budget import Protection
    from kvassay.replay.protocol import Protocol
    from kvassay.report.fidelity import fidelity_data, fidelity_tables
    from kvassay.report.table import console_for

    with Console(stderr=True).status("open") as status:
        found = screen_trace(
            trace,
            policies,
            budgets,
            protection=Protection(sink, recent),
            protocol=Protocol(block_size=block_size, seed=seed),
            yardsticks=not alone,
            calibration=calibration,
            progress=status.update,
        )
    if as_json:
        click.echo(json.dumps(fidelity_data(found), indent=1))
    else:
        console_for().print(fidelity_tables(found))


def _screen_run(run: Path) -> None:
    from rich.console import Console

    from kvassay.experiment.results import Results
    from kvassay.experiment.screen import screen_run
    from kvassay.report.html import write_html

    with Console(stderr=True).status("open") as status:
        skipped = screen_run(Results.open(run), status.update)
    for label, reason in skipped.items():
        click.echo(f"not replayed: {label}: {reason}")
    click.echo(write_html(Results.open(run)))
