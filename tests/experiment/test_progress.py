from __future__ import annotations

import io

from rich.console import Console

from kvassay.experiment.progress import Bars, Plain, listening


def test_a_log_gets_one_line_per_unit_with_the_time_left() -> None:
    stream = io.StringIO()
    with listening(Console(file=stream, width=40), 3) as listener:
        assert isinstance(listener, Plain)
        listener.note("memory of [cpu], longer than a line of this console")
        listener.begin("a model, a workload with a long name, context 1")
        listener.step("recording 1/2 tokens")
        listener.end(True)
        listener.begin("[b]")
        listener.started -= 10
        listener.end(False)
        listener.begin("c")
        listener.started -= 20
        listener.end(False)
    assert stream.getvalue().splitlines() == [
        "memory of [cpu], longer than a line of this console",
        "[1/3] a model, a workload with a long name, context 1: done before",
        "[2/3] [b]: 10.0 s, about 0:00:10 left",
        "[3/3] c: 20.0 s",
    ]


def test_a_terminal_gets_bars() -> None:
    stream = io.StringIO()
    with listening(Console(file=stream, force_terminal=True, width=120), 2) as listener:
        assert isinstance(listener, Bars)
        listener.begin("[odd] name")
        listener.step("recording")
        listener.end(False)
        task = listener.progress.tasks[0]
        assert (task.completed, task.total, task.description) == (1, 2, "\\[odd] name")
