"""Record of a step that is evaluated, in its round or at the beginning of the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from concertina_agent.core.tracking import RoundRecord, TrackingRecorder
from concertina_protocol.messages.reports import Evaluated, Progress
from concertina_protocol.tracking.tracking_records import StepDone

ROUND: Any = SimpleNamespace(assign=SimpleNamespace(members=[SimpleNamespace(workers=2)], round=2))


def said(step: int, loss: float, restored: int | None, evaluated: Evaluated | None = None) -> Progress:
    return Progress(
        step=step, steps=1000, loss=loss, tokens_per_second=1.0, step_seconds=1.0, position=8 * step, phase="training",
        at=float(step), restored_step=restored, restored_from="Storage", evaluated=evaluated,
    )  # fmt: skip


def steps(*told: Progress) -> list[StepDone]:
    tracking, known = TrackingRecorder(10), RoundRecord(2)
    records = [record for each in told for record in tracking._progress(ROUND, known, each, 0.0)]
    return [record for record in records if isinstance(record, StepDone)]


def test_an_evaluated_step_has_its_own_figures_and_the_evaluation() -> None:
    evaluated = Evaluated(110, 5.0)
    (step,) = steps(said(109, 0.9, 105), said(110, 0.8, 105), said(110, 0.8, 105, evaluated), said(111, 0.7, 105))
    assert (step.step, step.metrics["loss"], step.metrics["validation_loss"]) == (110, 0.8, 5.0)


def test_a_round_that_begins_with_an_evaluation_gives_its_step_no_figures_of_the_next() -> None:
    evaluated = Evaluated(
        100, 5.0, 148.4, {"code": 4.0}, token_accuracy=0.25, bits_per_byte=1.5, set_token_accuracies={"code": 0.5}
    )
    (step,) = steps(said(101, 0.7, 100, evaluated), said(102, 0.6, 100, evaluated))
    assert (step.step, dict(step.metrics)) == (
        100,
        {
            "validation_loss": 5.0, "validation_perplexity": 148.4, "validation_accuracy": 0.25,
            "validation_bits_per_byte": 1.5, "validation_loss_code": 4.0, "validation_accuracy_code": 0.5,
        },
    )  # fmt: skip
