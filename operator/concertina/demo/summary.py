"""Summary of the demo: a table of results, and the checks that failed."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rich.table import Table

from concertina.demo.history import DemoHistory
from concertina.demo.stage import BUCKET, Stage
from concertina.terminal import show

RECOVERY_PROMISE = 30.0
"""Maximum number of seconds from the kill of the node to the next step. Benchmarks measure this time precisely."""


def manifests(stage: Stage) -> list[str]:
    """Return the object keys of all checkpoint manifests in the bucket."""
    from concertina_state.objects.prefix import ObjectPrefix

    os.environ.update(stage.storage.environment())
    keys = ObjectPrefix(f"s3://{BUCKET}").list("checkpoints/")
    return sorted(key for key in keys if key.endswith("manifest.json"))


def seconds_to_next_step(history: DemoHistory) -> float | None:
    """Return the seconds from the kill of the node to the end of the next step; None if there is no such step."""
    killed = history.marked("kill")
    point = history.first_step_after(killed) if killed else None
    return point.at - killed if point and killed else None


def summarise(history: DemoHistory, stage: Stage) -> Table:
    """Return a table with the results of the demo."""
    status, goodput = history.status, history.status.goodput
    manifest_keys = manifests(stage)
    recovery = seconds_to_next_step(history)
    progress, last = status.progress, status.last_checkpoint
    losses = sorted(history.losses, key=lambda point: point.step)
    table = Table("", "", title="What happened", show_header=False)
    table.add_row("steps", str(progress.step if progress else 0))
    table.add_row("loss at start and end", f"{losses[0].loss:.3f} → {losses[-1].loss:.3f}" if losses else "none")
    table.add_row("kill to the next step", f"{recovery:.2f} s" if recovery is not None else "never")
    table.add_row("steps replayed", str(status.steps_replayed))
    table.add_row("rounds", str(status.rounds))
    named = last.step if last else None
    table.add_row(
        "checkpoints in the bucket", f"{len(manifest_keys)}, listed from the bucket; the status names step {named}"
    )
    for key in manifest_keys:
        table.add_row("", key.split("/", 2)[2].removesuffix("/manifest.json"))
    for name, seconds in goodput.by_class.items():
        if seconds:
            table.add_row(f"seconds {name}", f"{seconds:.1f}")
    table.add_row("goodput", show.goodput(goodput))
    return table


def broken_promises(history: DemoHistory, stage: Stage) -> list[str]:
    """Return one sentence for each check of the demo that failed, such as a step that was lost."""
    return list(_find_broken_promises(history, stage))


def _find_broken_promises(history: DemoHistory, stage: Stage) -> Iterator[str]:
    status = history.status
    end, progress = show.ended(status), status.progress
    if end is None or end.type != "Complete":
        yield f"the job is not complete: {show.said(status)}"
    if progress is None:
        yield "the run made no step"
    elif progress.step != progress.steps:
        yield f"the run ended at step {progress.step} of {progress.steps}"
    recovery = seconds_to_next_step(history)
    if recovery is None or recovery > RECOVERY_PROMISE:
        yield f"it took {recovery} s from the kill to the next step"
    losses = sorted(history.losses, key=lambda point: point.step)
    if not losses or losses[-1].loss >= losses[0].loss * 0.8:
        yield "the loss did not fall"
    killed, grown = history.marked("kill"), history.marked("grown")
    after = [sample.world for sample in history.samples if killed and grown and killed < sample.at < grown]
    if 2 not in after:
        yield "the run did not continue with two replicas"
    if not any(grown and sample.at >= grown - 1 and sample.world == 3 for sample in history.samples):
        yield "the run did not grow back to three replicas"
    last = status.last_checkpoint
    if last is None:
        yield "the status names no checkpoint"
    elif not any(f"s3://{BUCKET}/{key}".startswith(last.uri) for key in manifests(stage)):
        yield f"the checkpoint that the status names ({last.uri}) is not in the bucket"
