"""Table with the verdict of a drill, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from concertina.drill.verdict import DrillVerdict


def table(verdict: DrillVerdict) -> Table:
    """Return a table with one row for each value of the verdict."""
    colour = "green" if verdict.passed else "red"
    result = Table("", "", title=f"Drill {verdict.scenario} of {verdict.job}", show_header=False)
    for name, value in _rows(verdict):
        result.add_row(name, value)
    result.add_row("verdict", f"[bold {colour}]{'PASS' if verdict.passed else 'FAIL'}")
    for reason in verdict.reasons:
        result.add_row("", reason)
    return result


def _rows(verdict: DrillVerdict) -> Iterator[tuple[str, str]]:
    observation = verdict.seen
    yield "done", verdict.done
    if observation.cause:
        yield "the operator says", observation.cause
    times = {
        "operator claimed a round": observation.seconds.claimed if observation.rounds else None,
        "members committed": observation.seconds.committed if observation.rounds else None,
        "first step" if observation.rounds else "next step or word of it": observation.seconds.first_step,
        "straggler named": observation.seconds.named,
        "the job told of it": observation.seconds.told,
        "all replicas at work": observation.seconds.whole,
        "checkpoint": observation.seconds.checkpoint,
    }
    for name, seconds in times.items():
        if seconds is not None:
            yield name, f"after {seconds:.2f} s"
    world = f"{observation.before} → {observation.after} → {observation.end} replicas"
    yield "world", f"{world}, {observation.rounds_in_all} new rounds"
    yield "steps", f"{observation.steps_meanwhile} finished in the meantime, {observation.replayed} trained again"
    yield "restarts", f"{observation.counted} counted"
    yield "positions", verdict.positions
