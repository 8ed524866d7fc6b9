"""What a worker of an old round says too late."""

from __future__ import annotations

from builders.agent import Driver
from concertina_agent.core import events as e
from concertina_agent.core.tracking import TrackingRecorder
from concertina_protocol.messages.reports import Progress
from concertina_protocol.tracking.tracking_records import RoundBegan, StepDone


def progress(step: int) -> Progress:
    return Progress(
        step=step, steps=1000, loss=0.5, tokens_per_second=1.0, step_seconds=1.0, position=8 * step, phase="training",
        at=float(step), restored_step=7, restored_from="Memory",
    )  # fmt: skip


def test_progress_of_an_old_round_is_neither_reported_nor_tracked() -> None:
    driver, tracking = Driver(), TrackingRecorder(1)
    driver.begun("a", "b", round=2)

    def recorded(round: int, step: int) -> list[type]:
        message = progress(step)
        effects = driver.say(message, round=round)
        records = tracking.records(driver.core, e.WorkerMessage(round, 0, message), effects, 1.0)
        return [type(record) for record in records]

    assert recorded(1, 99) == []
    assert driver.core.report().progress is None
    assert recorded(2, 8) == [RoundBegan]
    assert recorded(1, 99) == []
    assert recorded(2, 9) == [StepDone]
    reported = driver.core.report().progress
    assert reported is not None
    assert reported.step == 9
