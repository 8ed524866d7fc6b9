"""Causes in the last words of failures: in the sentences of those who say them, as they say them now."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from concertina.diagnosis.problems import Problem
from concertina.diagnosis.words import problem_in
from concertina_data.files import ManifestFile
from concertina_data.manifest import parse
from concertina_protocol import FailureReason
from concertina_protocol.messages.reports import OUT_OF_MEMORY
from concertina_state.errors import BadInput
from concertina_state.format.shardfile import Trend
from concertina_state.objects.messages import of_files
from concertina_trainer.config import TrainerConfig
from concertina_trainer.training.agreement import StepFlags, StepResult
from concertina_trainer.training.anomalies import SEASONED, Anomalies


def judged(loss: float, **policy: str) -> str:
    config = TrainerConfig.model_validate({"data": {"uri": "/d"}, "anomalies": policy})
    watch = Anomalies(config, (), Trend(2.0, 0.01, SEASONED))
    return raised(lambda: watch.skips(20, 80, StepResult(loss, 1.0, StepFlags())))


def raised(act: Callable[[], object]) -> str:
    with pytest.raises((BadInput, FloatingPointError), match="the") as error:
        act()
    return f"{type(error.value).__name__}: {error.value}"


SENTENCES = {
    "a loss that is NaN": (Problem.LOSS_NAN, lambda: judged(math.nan)),
    "a loss without a bound": (Problem.LOSS_NAN, lambda: judged(math.inf)),
    "a spike": (Problem.LOSS_SPIKE, lambda: judged(50.0, spike="Stop")),
    "a damaged shard": (
        Problem.DATA_DIGEST_MISMATCH,
        lambda: str(ManifestFile("a.bin", 4, "aa").damaged("s3://b/data", 4)),
    ),
    "another manifest": (Problem.DATA_DIGEST_MISMATCH, lambda: raised(lambda: parse(b"[]", "s3://b/data"))),
    "no room": (
        Problem.STORAGE_REFUSES,
        lambda: of_files("file:///d", "write a", OSError(28, "No space left on device")).message,
    ),
    "no memory": (Problem.MEMORY_GROWS, lambda: OUT_OF_MEMORY),
    "a rank's memory": (Problem.CORRUPT_STATE, lambda: FailureReason.SILENT_CORRUPTION),
    "a bug": (None, lambda: "Rank 0 exited with code 1: KeyError: 'loss'"),
}


@pytest.mark.parametrize("what", SENTENCES)
def test_a_cause_is_read(what: str) -> None:
    problem, said = SENTENCES[what]
    assert problem_in(said()) is problem
