"""Worker of the bundled trainer in which all measurements can be switched on and off.

In the steps that `turns.Turns` selects, nothing is timed, reported or logged. The rest of the training loop behaves as
if it contained no measurements.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from concertina_protocol.heartbeat import WorkerPhase
from concertina_state.step_trace import Traces
from concertina_trainer import worker
from concertina_trainer.parallel.step_times import StepTimes
from concertina_trainer.training.progress_report import Reporter

sys.path.append(str(Path(__file__).parents[1]))
from turns import Hooks, Turns

NOTHING = contextlib.nullcontext()


class Timed:
    """Context manager that measures the time of another context manager's enter and exit code."""

    def __init__(self, hooks: Hooks, name: str, inner: Any) -> None:
        self._hooks, self._name, self._inner = hooks, name, inner

    def __enter__(self) -> Any:
        with self._hooks.timed(self._name):
            return self._inner.__enter__()

    def __exit__(self, *raised: Any) -> Any:
        with self._hooks.timed(self._name):
            return self._inner.__exit__(*raised)


def main() -> None:
    turns = Turns()
    hooks = turns.hooks
    measured, enter, step, after = StepTimes.measured, Reporter.enter, Reporter.step, Traces.after
    send, note = Reporter._send, Reporter.note

    def timed(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if not turns.times_hooks:
                return act(*arguments, **named)
            with hooks.timed(name):
                return act(*arguments, **named)

        return call

    def in_turn(act: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **named: act(*arguments, **named) if turns.on else None

    def measured_in_turn(self: StepTimes, part: Any) -> Any:
        if not turns.on:
            return NOTHING
        inner = measured(self, part)
        return Timed(hooks, "a clock round a part of a step", inner) if turns.times_hooks else inner

    heartbeat = timed("the heartbeat", enter)

    def enter_in_turn(self: Reporter, phase: WorkerPhase, number: int) -> None:
        if phase is WorkerPhase.LOADING_DATA and turns.begins(number):
            turns.write()
            os._exit(0)
        if turns.on:
            heartbeat(self, phase, number)

    StepTimes.measured = measured_in_turn
    Reporter.enter = enter_in_turn
    Reporter._send = timed("of that: Progress sent", send)
    Reporter.note = timed("of that: the line in the log", note)
    Reporter.step = in_turn(timed("a step told of", step))
    Traces.after = in_turn(timed("a trace that nobody asked for", after))
    worker.main()
