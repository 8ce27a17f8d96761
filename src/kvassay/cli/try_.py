"""`kvassay try`: policies on one model against the arms that always run, without writing a file."""

from __future__ import annotations

from pathlib import Path

import click

from kvassay.cli.params import TokenCount


@click.command("try")
@click.argument("model", metavar="MODEL")
@click.argument("policies", nargs=-1, required=True, metavar="POLICY...")
@click.option("--budget", "budgets", multiple=True, default=["keep=0.25"], show_default=True, help="Repeatable.")
@click.option("--context", default="2k", show_default=True, type=TokenCount(), help="Tokens per context, e.g. 4k.")
@click.option("--workload", "workloads", multiple=True, default=["kv_short"], show_default=True, help="Repeatable.")
@click.option("--contexts", default=5, show_default=True, type=click.IntRange(1), help="How many contexts.")
@click.option("--questions", default=3, show_default=True, type=click.IntRange(1), help="Questions per context.")
@click.option("--query-aware", is_flag=True, help="Let policies see the questions while compressing.")
@click.option("--own-prefill", is_flag=True, help="Also run POLICY... with a prefill of their own, first budget.")
@click.option("--timing/--no-timing", default=True, show_default=True, help="Time every arm's decode attention.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of texts and policies.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--jobs", type=click.IntRange(1), help="Contexts at a time, a process each.  [default: by cores]")
@click.option("--out", type=click.Path(path_type=Path), help="Run folder.  [default: one under runs/ by its settings]")
def try_(
    model: str,
    policies: tuple[str, ...],
    budgets: tuple[str, ...],
    context: int,
    workloads: tuple[str, ...],
    contexts: int,
    questions: int,
    query_aware: bool,
    own_prefill: bool,
    timing: bool,
    seed: int,
    device: str,
    jobs: int | None,
    out: Path | None,
) -> None:
    """Try POLICY... on MODEL and print them beside the arms that always run.

    POLICY is a name with parameters, "snapkv(window=32)", or a class of your own, my_policy.py:MyPolicy.
    MODEL is an embedded name, a model folder or a Hugging Face id.
    """
    from kvassay.experiment.asked import check_asked
    from kvassay.experiment.quick import quick_experiment

    made = quick_experiment(
        model,
        policies,
        budgets,
        workloads=workloads,
        length=context,
        contexts=contexts,
        questions=questions,
        query_aware=query_aware,
        own_prefill=own_prefill,
        timing=timing,
        seed=seed,
        device=device,
    )
    check_asked(made, "kvassay try", Path())
    # Only now what takes seconds to import: a slip is told at once.
    from kvassay.experiment.plan import make_plan

    plan = make_plan(made, "kvassay try", Path())
    from kvassay.report.session import run_and_report

    run_and_report(plan, out, jobs)
