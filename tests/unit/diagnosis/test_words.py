"""Causes of failures, by their reasons or by the sentences in which the components report them now."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from concertina.diagnosis.problems import Problem
from concertina.diagnosis.words import problem_of
from concertina_data.data_manifest import parse
from concertina_data.files import ManifestFile
from concertina_protocol import FailureReason
from concertina_protocol.messages.reports import OUT_OF_MEMORY
from concertina_state.errors import DataChanged, InvalidInput
from concertina_state.format.shardfile import Trend
from concertina_state.objects.messages import of_files
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.training.agreement import StepFlags, StepResult
from concertina_trainer.training.anomalies import SEASONED, Anomalies


def judged(loss: float, **policy: str) -> str:
    config = TrainerConfig.model_validate({"data": {"uri": "/d"}, "anomalies": policy})
    watch = Anomalies(config, (), Trend(2.0, 0.01, SEASONED))
    return raised(lambda: watch.skips(20, 80, StepResult(loss, 1.0, StepFlags())))


def raised(act: Callable[[], object]) -> str:
    with pytest.raises((InvalidInput, FloatingPointError), match="the") as error:
        act()
    return f"{type(error.value).__name__}: {error.value}"


SENTENCES = {
    "a loss that is NaN": (Problem.LOSS_NAN, lambda: judged(math.nan)),
    "a loss without a bound": (Problem.LOSS_NAN, lambda: judged(math.inf)),
    "a spike": (Problem.LOSS_SPIKE, lambda: judged(50.0, spike="Stop")),
    "no room": (
        Problem.STORAGE_REFUSES,
        lambda: of_files("file:///d", "write a", OSError(28, "No space left on device")).message,
    ),
    "a manifest": (None, lambda: raised(lambda: parse(b"[]", "s3://b/data"))),
    "a bug": (None, lambda: "Rank 0 exited with code 1: KeyError: 'loss'"),
}


@pytest.mark.parametrize("what", SENTENCES)
def test_a_cause_without_a_reason_is_read(what: str) -> None:
    problem, said = SENTENCES[what]
    assert problem_of(FailureReason.WORKER_FAILED, "exited with code 1", said()) is problem


DAMAGED = ManifestFile("a.bin", 4, "aa").damaged("s3://b/data", 4)


@pytest.mark.parametrize(
    ("reason", "said", "problem"),
    [
        (DAMAGED.reason, str(DAMAGED), Problem.CORRUPT_STATE),
        (DataChanged.reason, "in whatever words", Problem.DATA_DIGEST_MISMATCH),
        (DataChanged.reason, f"printed before: {OUT_OF_MEMORY}, No space left on device", Problem.DATA_DIGEST_MISMATCH),
        (FailureReason.SILENT_CORRUPTION, "", Problem.CORRUPT_STATE),
        (FailureReason.OUT_OF_MEMORY, OUT_OF_MEMORY, Problem.MEMORY_GROWS),
        (FailureReason.LOSS_SPIKE, "", Problem.LOSS_SPIKE),
        (FailureReason.LOSS_NOT_FINITE, "", Problem.LOSS_NAN),
        (FailureReason.INVALID_INPUT, "build the data again", None),
    ],
)
def test_a_reason_counts_before_all_that_was_said(reason: str, said: str, problem: Problem | None) -> None:
    assert problem_of(reason, said) is problem
