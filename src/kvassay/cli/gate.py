"""`kvassay gate`: declare what must be shown, verify the log of declarations, judge a run."""

from __future__ import annotations

import json
from pathlib import Path

import click

file_path = click.Path(path_type=Path)


class _RunByDefault(click.Group):
    """A group where anything but a subcommand is a run to judge."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `judge` in front of a run folder and its options."""
        if args and args[0] not in self.commands and not {"-h", "--help"} & set(args[:1]):
            args = ["judge", *args]
        return super().parse_args(ctx, args)


@click.group("gate", cls=_RunByDefault)
def gate() -> None:
    """Declare a gate before a run, and judge runs by it.

    `kvassay gate RUN` is short for `kvassay gate judge RUN`.
    """


@gate.command()
@click.argument("file", type=file_path)
def declare(file: Path) -> None:
    """Check the gate FILE, enter it in the log beside it, and say what its planned samples can tell apart."""
    from kvassay.gate.declare import declare, detectable

    found = declare(file)
    entry = found.entry
    was = "declared" if found.anew else "was declared already, unchanged,"
    click.echo(f"gate {entry.gate} {was} at {entry.time}: entry {entry.number} of {found.log}, hash {entry.hash}")
    plan, alpha = found.gate.samples, found.gate.gate.alpha
    click.echo(
        f"{plan.contexts} contexts of {plan.questions} questions per trace set, alpha {alpha:g}, power {plan.power:g}:"
    )
    for item in detectable(found.gate):
        click.echo(f"  {item.line}")
    if entry.commit is None:
        click.echo("not in git as it is; commit it before the run, and its order can be proved by more than the log")


@gate.command()
@click.argument("log", type=file_path)
@click.option("--head", help="Hash of an entry that must still be there: shows whether the log was cut off.")
def verify(log: Path, head: str | None) -> None:
    """Prove the chain of LOG, or of the log in a folder."""
    from kvassay.gate.chain import LOG, verify

    path = log / LOG if log.is_dir() else log
    entries = verify(path, head)
    for entry in entries:
        click.echo(f"{entry.number}  {entry.time}  {entry.gate}  {entry.file}  sha256 {entry.sha256[:12]}")
    last = f", head {entries[-1].hash}" if entries else ""
    click.echo(f"{path}: {len(entries)} entries, the chain is whole{last}")


@gate.command()
@click.argument("run", type=file_path)
@click.option("--gate", "gate_file", type=file_path, help="Gate file.  [default: the one in RUN]")
@click.option("--exploratory", is_flag=True, help="Judge by a gate that was not declared before, and say so.")
@click.option("--json", "as_json", is_flag=True, help="Print verdicts.json.")
@click.option("--issue", type=file_path, help="Write a draft issue for each promoted arm into this folder.")
def judge(run: Path, gate_file: Path | None, exploratory: bool, as_json: bool, issue: Path | None) -> None:
    """Judge the finished run folder RUN and print the verdicts; its verdicts.json and report follow if they change."""
    from kvassay.experiment.folder import REPORT
    from kvassay.experiment.results import Results
    from kvassay.gate.session import judge_run, judged_before
    from kvassay.measure.verdict import dump_judgement
    from kvassay.report.html import write_html
    from kvassay.report.table import console_for
    from kvassay.report.verdicts import verdict_table

    results = Results.open(run)
    before = judged_before(run)
    judgement = judge_run(results, gate_file, exploratory=exploratory)
    if judgement != before or not (run / REPORT).is_file():
        write_html(results)
    if as_json:
        click.echo(json.dumps(json.loads(dump_judgement(judgement)), indent=1, ensure_ascii=False))
    else:
        console_for().print(verdict_table(run))
    if issue is not None:
        from kvassay.gate.issue import write_issues

        paths = write_issues(results, judgement, issue)
        click.echo("\n".join(map(str, paths)) or "no arm was promoted, no issue was written", err=as_json)
