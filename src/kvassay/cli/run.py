"""`kvassay run`: an experiment file into a run folder."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("run")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Run folder.  [default: runs/NAME]")
@click.option("--jobs", type=click.IntRange(1), help="Contexts at a time, a process each.  [default: by cores]")
@click.option("--contexts", type=click.IntRange(1), help="Only the first so many of each workload, for now.")
@click.option("--gate", "gate_file", type=click.Path(path_type=Path), help="Judge the run by this declared gate.")
@click.option("--exploratory", is_flag=True, help="With --gate: judge even by a gate not declared before, and say so.")
def run(
    file: Path, out: Path | None, jobs: int | None, contexts: int | None, gate_file: Path | None, exploratory: bool
) -> None:
    """Run the experiment FILE (TOML) and print its table.

    May be stopped at any moment; the same command continues where it stopped. Files of finished units are
    reused, so a second run of a finished experiment only prints. With --gate the gate is copied into the run folder
    before anything is computed, and must have been declared by then; a continued run is judged by it again.

    With --contexts a big experiment is run in instalments: a later run with more of them computes those alone.

    A [[long]] table replays synthetic rows of a model's layer shape, 128k to 1m tokens, layer by layer in the open
    loop; no model is needed for it. --gate and --contexts are about workloads: long rows have no verdict.
    """
    if exploratory and gate_file is None:
        raise click.UsageError("--exploratory needs --gate")
    from kvassay.experiment.asked import about_workloads, check_asked
    from kvassay.experiment.schema import load_experiment
    from kvassay.gate.schema import load_gate

    experiment = load_experiment(file)
    check_asked(experiment, str(file), file.parent)
    options = [name for name, value in (("--gate", gate_file), ("--contexts", contexts)) if value is not None]
    if experiment.long and options:
        click.echo(about_workloads(experiment, str(file), options), err=True)
    if gate_file is not None:
        load_gate(gate_file)
    # Only now, step by step, what takes seconds to import: a slip in the file is told at once.
    from kvassay.experiment.plan import make_plan

    fewer = experiment if contexts is None else experiment.first(contexts)
    plan = make_plan(fewer, str(file), file.parent) if experiment.workload else None
    from kvassay.gate.session import judge_run, pin, pinned
    from kvassay.report.session import RUNS, run_and_report

    def begin(folder: Path) -> None:
        if gate_file is not None:
            pin(gate_file, folder, exploratory=exploratory)
        if experiment.long:
            from kvassay.report.long import run_long_and_report
            from kvassay.report.table import console_for

            run_long_and_report(experiment, str(file), file.parent, folder, console_for())

    if plan is None:
        begin(out or RUNS / experiment.experiment.name)
        return
    run_and_report(
        plan,
        out,
        jobs,
        begin=begin,
        judge=lambda results: (
            judge_run(results, gate_file, exploratory=exploratory) if gate_file or pinned(results.path) else None
        ),
    )
