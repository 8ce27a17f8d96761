"""Saying how far a run is: bars with the time left in a terminal, plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Listener(Protocol):
    """Told of a run's units as they begin, move and end."""

    def begin(self, title: str) -> None:
        """A unit begins."""

    def step(self, doing: str) -> None:
        """The unit that has begun does something."""

    def end(self, found: bool) -> None:
        """The unit is done; `found` says it was there from an earlier run."""

    def note(self, text: str) -> None:
        """Something to be known of the whole run."""


class Silent:
    """A listener that says nothing."""

    def begin(self, title: str) -> None:
        """Say nothing."""

    def step(self, doing: str) -> None:
        """Say nothing."""

    def end(self, found: bool) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""


class Plain:
    """One line per unit, for logs."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total = console, total
        self.done = self.computed = 0
        self.title = ""
        self.started = time.monotonic()
        self.spent = 0.0

    def begin(self, title: str) -> None:
        """Remember what is being done; time is counted from the end of the unit before, also side by side."""
        self.title = title

    def step(self, doing: str) -> None:
        """Steps are too many for a log."""

    def end(self, found: bool) -> None:
        """Print the unit, its time and what is left."""
        self.done += 1
        if found:
            self._print("done before")
            self.started = time.monotonic()
            return
        seconds, self.started = time.monotonic() - self.started, time.monotonic()
        self.spent, self.computed = self.spent + seconds, self.computed + 1
        left = self.spent / self.computed * (self.total - self.done)
        self._print(f"{seconds:.1f} s" + (f", about {_clock(left)} left" if self.done < self.total else ""))

    def note(self, text: str) -> None:
        """Print it."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _print(self, text: str) -> None:
        line = f"[{self.done}/{self.total}] {self.title}: {text}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class Bars:
    """A bar over all units with the time left, and what the current one does."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress = progress
        self.bar = progress.add_task("starting", total=total, doing="")

    def begin(self, title: str) -> None:
        """Name the unit."""
        self.progress.update(self.bar, description=escape(title), doing="")

    def step(self, doing: str) -> None:
        """Show what it does."""
        self.progress.update(self.bar, doing=escape(doing))

    def end(self, found: bool) -> None:
        """Move on."""
        self.progress.advance(self.bar)

    def note(self, text: str) -> None:
        """Print it above the bar."""
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def listening(console: Console, total: int) -> Iterator[Listener]:
    """A listener for `total` units that suits the console."""
    if not console.is_terminal:
        yield Plain(console, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[doing]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bars(progress, total)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
