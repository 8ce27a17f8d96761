"""The `kvassay` command: verbs found by name, imported when used, and errors told on one line."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

import click

from kvassay import __version__
from kvassay.errors import KvassayError, did_you_mean

VERBS = {
    "demo": ("kvassay.cli.demo:demo", "Judge a dozen policies on two small real models."),
    "try": ("kvassay.cli.try_:try_", "Try policies on one model against the arms that always run."),
    "run": ("kvassay.cli.run:run", "Run an experiment file; the same command continues it."),
    "gate": ("kvassay.cli.gate:gate", "Declare a gate before a run, and judge runs by it."),
    "show": ("kvassay.cli.show:show", "Show the results of a run: table, JSON, HTML or picture."),
    "compare": ("kvassay.cli.compare:compare", "Say what changed between two runs, paired and tested."),
    "keys": ("kvassay.cli.keys:keys", "Say what a key of the experiment or gate file means."),
    "columns": ("kvassay.cli.columns:columns", "Say what a column of the result files counts."),
    "ls": ("kvassay.cli.ls:ls", "List run folders."),
    "clean": ("kvassay.cli.clean:clean", "Drop a finished run's recorded contexts; results stay."),
    "policies": ("kvassay.cli.policies:policies", "List policies and show their cards."),
    "applicability": (
        "kvassay.cli.applicability:applicability",
        "On which kinds of attention state each candidate makes sense.",
    ),
    "workloads": ("kvassay.cli.workloads:workloads", "List workloads and preview their text."),
    "models": ("kvassay.cli.models:models", "Fetch and list the embedded models."),
    "inspect": ("kvassay.cli.inspect:inspect", "Show a model's cache: layers, groups, bytes by context."),
    "cost": ("kvassay.cli.cost:cost", "Model a cache's decode time on given hardware."),
    "record": ("kvassay.cli.record:record", "Record one context of a workload into a trace."),
    "fidelity": ("kvassay.cli.fidelity:fidelity", "Screen policies on a trace's own queries, without a model."),
    "trace": ("kvassay.cli.trace:trace", "Show, verify, reblock and reproduce traces."),
    "requests": ("kvassay.cli.requests:requests", "Show what a request trace asks for: lengths, prefix hit rates."),
    "serve-replay": ("kvassay.cli.serve_replay:serve_replay", "Serve a request trace with a policy's footprint."),
}
"""Verb: where its command is, and the line `--help` shows, so that help imports nothing else."""

EXIT_INPUT = 2
EXIT_INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Verbs in the order of use."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the verb's command; None if there is none."""
        if cmd_name not in VERBS:
            return None
        module, attribute = VERBS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or say which one was probably meant."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise click.UsageError(f"no command is called '{args[0]}'{did_you_mean(args[0], VERBS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in VERBS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvassay")
def cli() -> None:
    """Say, with evidence, which long-context KV-cache policy deserves an implementation."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 well, 1 internal error, 2 wrong input or a file problem, 130 interrupted."""
    try:
        status = cli.main(args=None if arguments is None else list(arguments), standalone_mode=False)
    except KvassayError as error:
        _fail(str(error))
    except click.Abort:
        _interrupted()
    except KeyboardInterrupt:
        _interrupted()
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader has gone (`| head`); Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        _fail(f"{error.filename or 'a file'}: {error.strerror}")
    else:
        sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str) -> None:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(EXIT_INPUT)


def _interrupted() -> None:
    click.echo("interrupted; run the same command to continue", err=True)
    sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
