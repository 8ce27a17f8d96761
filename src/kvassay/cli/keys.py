"""`kvassay keys`: every key of the experiment file and the gate file."""

from __future__ import annotations

import click


@click.command("keys")
@click.argument("file", required=False, type=click.Choice(["experiment", "gate"]))
@click.argument("table", required=False)
@click.option("--example", "as_example", is_flag=True, help="Print a whole FILE to copy and change.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the page docs/files.md.")
def keys(file: str | None, table: str | None, as_example: bool, as_markdown: bool) -> None:
    """Say what the keys of experiment.toml and gate.toml mean, of which type they are, and their defaults.

    All of them, those of one FILE, or those of one TABLE in it: `kvassay keys experiment arms`.
    """
    from kvassay.gate.keys import example, lines, markdown

    if as_example and file is None:
        raise click.UsageError("--example needs a file: experiment or gate")
    if as_markdown:
        click.echo(markdown(), nl=False)
    elif as_example and file is not None:
        click.echo(example(file), nl=False)
    else:
        for line in lines(file, table):
            click.echo(line)
