"""A verdict for a person's eyes."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from concertina.drill.verdict import DrillVerdict


def table(verdict: DrillVerdict) -> Table:
    """A line for each figure."""
    colour = "green" if verdict.passed else "red"
    result = Table("", "", title=f"Drill {verdict.scenario} of {verdict.job}", show_header=False)
    for name, value in _rows(verdict):
        result.add_row(name, value)
    result.add_row("verdict", f"[bold {colour}]{'PASS' if verdict.passed else 'FAIL'}")
    for reason in verdict.reasons:
        result.add_row("", reason)
    return result


def _rows(verdict: DrillVerdict) -> Iterator[tuple[str, str]]:
    seen = verdict.seen
    yield "done", verdict.done
    if seen.cause:
        yield "the operator says", seen.cause
    times = {
        "operator claimed a round": seen.seconds.claimed if seen.rounds else None,
        "members committed": seen.seconds.committed if seen.rounds else None,
        "first step" if seen.rounds else "next step or word of it": seen.seconds.first_step,
        "straggler named": seen.seconds.named,
        "the job told of it": seen.seconds.told,
        "all replicas at work": seen.seconds.whole,
        "checkpoint": seen.seconds.checkpoint,
    }
    for name, seconds in times.items():
        if seconds is not None:
            yield name, f"after {seconds:.2f} s"
    yield "world", f"{seen.before} → {seen.after} → {seen.end} replicas, {seen.rounds_in_all} new rounds"
    yield "steps", f"{seen.steps_meanwhile} made meanwhile, {seen.replayed} trained again"
    yield "restarts", f"{seen.counted} counted"
    yield "positions", verdict.positions
