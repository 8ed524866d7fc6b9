"""Next steps that `concertina status JOB` suggests."""

from __future__ import annotations

from typing import Any

import pytest

from concertina.api.accounting import Goodput
from concertina.api.restarts import Restarts
from concertina.api.status import CheckpointMark, Condition, ConditionType, JobStatus, StragglerMark, rfc3339
from concertina.terminal.advice import next_step

NOW = rfc3339(1_800_000_000)
RUNNING = ConditionType.RUNNING
SLOW = Goodput(percent=50, productive_seconds=500, recovery_seconds=500, at=NOW)
YOUNG = Goodput(percent=50, productive_seconds=5, startup_seconds=5, at=NOW)
SAVED = CheckpointMark(step=9, uri="s3://b/a/step-9", at=NOW)
BEHIND = StragglerMark(rank=1, replica="a-1-0", seconds=2.0, others_seconds=1.0, since=NOW)


@pytest.mark.parametrize(
    ("true", "fields", "words"),
    [
        ((ConditionType.FAILED, ConditionType.STALLED), {}, "logs a --since-failure"),
        ((ConditionType.COMPLETE,), {"last_checkpoint": SAVED}, "checkpoint show s3://b/a/step-9"),
        ((ConditionType.COMPLETE,), {}, "logs a` shows its output"),
        ((ConditionType.STALLED, RUNNING), {}, "the message of the condition Stalled says what to change"),
        ((ConditionType.DEGRADED, RUNNING), {}, "the message of the condition Degraded says what to change"),
        ((ConditionType.SUSPENDED,), {}, "resume a`"),
        ((), {}, "kubectl get pods -l concertina.dev/job=a"),
        ((RUNNING,), {"restarts": Restarts(total=9, budget=1)}, "one more failure may end it"),
        ((RUNNING,), {"restarts": Restarts(total=0, budget=0)}, "nothing to do"),
        ((RUNNING,), {"stragglers": (BEHIND,)}, "wait for a-1-0"),
        ((RUNNING,), {"goodput": SLOW}, "shows what takes the time"),
        ((RUNNING,), {"goodput": YOUNG}, "nothing to do"),
    ],
)
def test_the_first_that_holds(true: tuple[ConditionType, ...], fields: dict[str, Any], words: str) -> None:
    conditions = tuple(Condition(type=kind, status="True", reason="R", last_transition_time=NOW) for kind in true)
    assert words in next_step("a", JobStatus(conditions=conditions, **fields))
