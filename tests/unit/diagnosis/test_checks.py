"""Each check by itself: its finding, and on which side of its threshold it finds nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from builders.jobs import T0, spec
from concertina.api.accounting import Goodput, Incident
from concertina.api.restarts import LastFailure, Restart, Restarts
from concertina.api.status import (
    CheckpointEvery,
    CheckpointMark,
    Condition,
    JobProgress,
    JobStatus,
    RollbackMark,
    StragglerMark,
    rfc3339,
)
from concertina.api.world import World
from concertina.diagnosis.diagnose import CHECKS, cost, diagnose
from concertina.diagnosis.evidence import AgentFigures, JobEvidence, StepLine
from concertina.diagnosis.finding import Severity
from concertina.diagnosis.problems import Problem

NOW = T0 + 7200
CHECKPOINT = {"uri": "file:///run", "everySeconds": 60}
GIB = float(1 << 30)


def ago(seconds: float) -> str:
    return rfc3339(NOW - seconds)


def condition(kind: str, reason: str, message: str = "said", status: Any = "True") -> Condition:
    return Condition(type=kind, status=status, reason=reason, message=message, last_transition_time=ago(60))


def status(phase: str = "Training", *conditions: Condition, **fields: Any) -> JobStatus:
    """Return the status of a job whose two replicas have trained well for two hours."""
    values: dict[str, Any] = {
        "conditions": (condition("Ready", phase), *conditions),
        "goodput": Goodput(productive_seconds=7100, startup_seconds=100, at=ago(1)),
        "progress": JobProgress(step=1000, loss=2.0, step_seconds=7.0, mfu=0.4, at=ago(1)),
        "world": World(round=1, replicas=2, workers=2, coordinator="a-0-0", since=ago(7000)),
        "restarts": Restarts(budget=10),
        "replicas": 2,
    }
    return JobStatus(**{**values, **fields})


def evidence(now: JobStatus, **fields: Any) -> JobEvidence:
    values: dict[str, Any] = {"spec": spec(replicas=2), "at": NOW, "created": T0, "live": True}
    return JobEvidence(status=now, **{**values, **fields})


def found(seen: JobEvidence) -> list[Problem]:
    return [finding.problem for finding in diagnose(seen).findings]


def seconds(**classes: float) -> Goodput:
    return Goodput(at=ago(1), **{f"{name}_seconds": value for name, value in classes.items()})


def incidents(*took: float) -> dict[str, Any]:
    return {"incidents": tuple(Incident(at=ago(600), cause="WorkerFailed", node="n", seconds=each) for each in took)}


def lines(*losses: float | None) -> tuple[StepLine, ...]:
    return tuple(StepLine(step=number, loss=loss, seconds=1.0) for number, loss in enumerate(losses))


def looks(*sizes: float, replica: str = "a-0-0") -> tuple[AgentFigures, ...]:
    return tuple(AgentFigures(replica=replica, at=NOW + 10 * n, worker_bytes=size) for n, size in enumerate(sizes))


def busy(*shares: float, replica: str = "a-0-0") -> tuple[AgentFigures, ...]:
    """Return readings of a replica with one GPU."""
    return tuple(AgentFigures(replica=replica, at=NOW + n, gpu_utilization=(share,)) for n, share in enumerate(shares))


SCRIPT = JobProgress(step=1, at=ago(1))


def failure(reason: str, message: str) -> LastFailure:
    return LastFailure(at=ago(600), round=1, replica="a-0-0", reason=reason, message=message)


def restarted(budget: int) -> Restarts:
    entry = Restart(at=ago(600), replica="a-0-0", reason="WorkerFailed")
    return Restarts(in_window=9, budget=budget, total=9, recent=(entry,))


def out_of_memory(age: float) -> dict[str, Any]:
    entry = Restart(at=ago(age), replica="a-0-0", reason="OutOfMemory")
    return {"restarts": Restarts(in_window=1, budget=9, recent=(entry,))}


def saved(age: float, seconds: float = 60) -> dict[str, Any]:
    """Return a status with checkpoints at intervals of `seconds`."""
    return {
        "last_checkpoint": CheckpointMark(step=900, uri="file:///run/x", at=ago(age)),
        "checkpoint_interval": CheckpointEvery(seconds=seconds, suggested_seconds=60),
    }


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    said = diagnose(evidence(status()))
    assert said.findings == ()
    assert said.saw[0] == "time of 2h since the job was created: productive 99%, startup 1%"


CASES: dict[str, tuple[Problem, JobEvidence, JobEvidence]] = {
    "input": (
        Problem.INPUT_BOTTLENECK,
        evidence(status(goodput=seconds(productive=90, input=10))),
        evidence(status(goodput=seconds(productive=91, input=9))),
    ),
    "communication": (
        Problem.EXPOSED_COMMUNICATION,
        evidence(status(goodput=seconds(productive=75, communication=25, waiting=900))),
        evidence(status(goodput=seconds(productive=76, communication=24))),
    ),
    "saves": (
        Problem.SLOW_CHECKPOINT,
        evidence(status(goodput=seconds(productive=95, checkpoint=5))),
        evidence(status(goodput=seconds(productive=96, checkpoint=4))),
    ),
    "ranks that wait": (
        Problem.STRAGGLER,
        evidence(status(goodput=seconds(productive=90, straggler=10))),
        evidence(status(goodput=seconds(productive=91, straggler=9))),
    ),
    "too short to say": (
        Problem.INPUT_BOTTLENECK,
        evidence(status(goodput=seconds(input=5))),
        evidence(status(goodput=seconds(input=4.9))),
    ),
    "MFU": (
        Problem.LOW_MFU,
        evidence(status(progress=JobProgress(step=1, mfu=0.19, at=ago(1)))),
        evidence(status(progress=JobProgress(step=1, mfu=None, at=ago(1)))),
    ),
    "interruptions": (
        Problem.FREQUENT_FAILURES,
        evidence(status(**incidents(200, 200))),
        evidence(status(**incidents(400))),
    ),
    "restarts": (
        Problem.RESTARTS_NEARLY_USED,
        evidence(status(restarts=restarted(1))),
        evidence(status(restarts=restarted(2))),
    ),
    "too few replicas": (
        Problem.WORLD_BELOW_MINIMUM,
        evidence(status("Waiting", goodput=seconds(waiting=60, startup=10))),
        evidence(status("Waiting", goodput=seconds(waiting=10, productive=60))),
    ),
    "an old checkpoint": (
        Problem.CHECKPOINT_OLD,
        evidence(status(**saved(180)), spec=spec(checkpoint=CHECKPOINT)),
        evidence(status(**saved(179)), spec=spec(checkpoint=CHECKPOINT)),
    ),
    "a checkpoint that steps have left behind, and one from before a suspension": (
        Problem.CHECKPOINT_OLD,
        evidence(status(**saved(7000, 0)), spec=spec(checkpoint={"uri": "file:///run", "everySteps": 33})),
        evidence(status(**saved(7000, 0)), spec=spec(checkpoint={"uri": "file:///run", "everySteps": 34})),
    ),
    "no checkpoint": (
        Problem.CHECKPOINT_OLD,
        evidence(status(), spec=spec(checkpoint={"uri": "file:///run", "everySteps": 10})),
        evidence(status(), spec=spec(checkpoint={"uri": "file:///run", "everySteps": 1000, "everySeconds": 7000})),
    ),
    "no checkpoint, and no word of how often": (
        Problem.CHECKPOINT_OLD,
        evidence(status(), spec=spec(checkpoint=CHECKPOINT)),
        evidence(status(), spec=spec(checkpoint={**CHECKPOINT, "everySeconds": "Auto"})),
    ),
    "an operator that is silent": (
        Problem.OPERATOR_DOWN,
        evidence(status(goodput=Goodput(productive_seconds=100, at=ago(301)))),
        evidence(status(goodput=Goodput(productive_seconds=100, at=ago(301))), live=False),
    ),
    "no operator": (
        Problem.OPERATOR_DOWN,
        evidence(JobStatus()),
        evidence(JobStatus(), created=NOW - 30),
    ),
    "a store that refuses": (
        Problem.STORAGE_REFUSES,
        evidence(
            status("Training", condition("Stalled", "StorageUnavailable"), **saved(180)),
            spec=spec(checkpoint=CHECKPOINT),
        ),
        evidence(status("Training", condition("Stalled", "StorageUnavailable", status="False"))),
    ),
    "a store that begins to refuse": (
        Problem.STORAGE_REFUSES,
        evidence(status(), agents=tuple(AgentFigures(replica="a", at=n, storage_failures=7 + n) for n in (0, 1))),
        evidence(status(), agents=tuple(AgentFigures(replica="a", at=n, storage_failures=7) for n in (0, 1))),
    ),
    "a tracker that is away": (
        Problem.TRACKER_UNREACHABLE,
        evidence(status(tracking="MLflow: ConnectionError: refused")),
        evidence(status()),
    ),
    "data that are away": (
        Problem.INPUT_BOTTLENECK,
        evidence(status("Training", condition("Stalled", "DataUnavailable"))),
        evidence(status()),
    ),
    "agents that are not heard": (
        Problem.OPERATOR_ISOLATED,
        evidence(status("Training", condition("Stalled", "AgentsUnreachable"))),
        evidence(status()),
    ),
    "another stall": (
        Problem.JOB_STALLED,
        evidence(status("Stalled", condition("Stalled", "PodRefused"))),
        evidence(status("Complete", condition("Complete", "Succeeded"), condition("Stalled", "PodRefused"))),
    ),
    "a job that failed": (
        Problem.JOB_FAILED,
        evidence(status("Failed", condition("Failed", "RepeatedFailure"), condition("Stalled", "RepeatedFailure"))),
        evidence(status("Complete", condition("Complete", "Succeeded"))),
    ),
    "other data": (
        Problem.DATA_DIGEST_MISMATCH,
        evidence(status(last_failure=failure("DataChanged", "said in any words"))),
        evidence(status(last_failure=failure("InvalidInput", "data.uri holds data with digest b, not a"))),
    ),
    "other data, at the end": (
        Problem.DATA_DIGEST_MISMATCH,
        evidence(status("Failed", condition("Failed", "DataChanged"))),
        evidence(status("Failed", condition("Failed", "RepeatedFailure"))),
    ),
    "damaged data": (
        Problem.CORRUPT_STATE,
        evidence(status(last_failure=failure("Damaged", "/d/a.bin is not what it was"))),
        evidence(status(last_failure=failure("WorkerFailed", "exited with code 1"))),
    ),
    "a hang that ended a round": (
        Problem.HANG,
        evidence(status(last_failure=failure("CollectiveHang", "no rank has moved for 62 s"))),
        evidence(status(last_failure=failure("WorkerFailed", "exited with code 1"))),
    ),
    "a hang, for a person": (
        Problem.HANG,
        evidence(status("Stalled", condition("Stalled", "Hang"))),
        evidence(status("Stalled", condition("Stalled", "PodRefused"))),
    ),
    "other data, for a person": (
        Problem.DATA_DIGEST_MISMATCH,
        evidence(status("Stalled", condition("Stalled", "DataChanged"))),
        evidence(status("Stalled", condition("Stalled", "PodRefused"))),
    ),
    "a damaged state": (
        Problem.CORRUPT_STATE,
        evidence(status(last_failure=failure("RestoreFailed", "shard 0 of the snapshot of step 3 is damaged: ..."))),
        evidence(status(last_failure=failure("MemberLost", "is gone"))),
    ),
    "NaN in the log": (
        Problem.LOSS_NAN,
        evidence(status(), steps=lines(2.0, None)),
        evidence(status(), steps=lines(None, 2.0)),
    ),
    "NaN in the metrics": (
        Problem.LOSS_NAN,
        evidence(status(), agents=(AgentFigures(replica="a", at=1, finite_loss=False),)),
        evidence(status(), agents=(AgentFigures(replica="a", at=1, finite_loss=True),)),
    ),
    "a rollback": (
        Problem.LOSS_SPIKE,
        evidence(status(rollback=RollbackMark(round=1, step=5, reason="LossSpike", at=ago(600)))),
        evidence(status(rollback=RollbackMark(round=1, step=5, reason="LossSpike", at=ago(3700)))),
    ),
    "a loss that jumps": (
        Problem.LOSS_SPIKE,
        evidence(status(), steps=lines(*[2.0] * 32, 4.1)),
        evidence(status(), steps=lines(*[2.0] * 32, 3.9)),
    ),
    "idle GPUs": (
        Problem.LOW_GPU_UTILIZATION,
        evidence(status(progress=SCRIPT), agents=busy(0.3, 0.7, 0.4)),
        evidence(status(progress=SCRIPT), agents=busy(0.3, 0.9, 0.6)),
    ),
    "idle GPUs of standby replicas": (
        Problem.LOW_GPU_UTILIZATION,
        evidence(status(progress=SCRIPT), agents=(*busy(0.3, 0.3, 0.3), *busy(math.nan, 0.0, replica="a-1-0"))),
        evidence(status(progress=SCRIPT), agents=(*busy(0.9, 0.9, 0.9), *busy(math.nan, 0.0, replica="a-1-0"))),
    ),
    "idle GPUs of a job with an MFU": (
        Problem.LOW_GPU_UTILIZATION,
        evidence(status(progress=SCRIPT), agents=busy(0.3, 0.3, 0.3)),
        evidence(status(), agents=busy(0.3, 0.3, 0.3)),
    ),
    "idle GPUs, seen twice": (
        Problem.LOW_GPU_UTILIZATION,
        evidence(status(progress=SCRIPT), agents=busy(0.3, 0.3, 0.3)),
        evidence(status(progress=SCRIPT), agents=(*busy(0.3, 0.3), *busy(0.3, replica="a-0-1"))),
    ),
    "memory": (
        Problem.MEMORY_GROWS,
        evidence(status(), agents=looks(GIB, 1.01 * GIB, 1.03 * GIB)),
        evidence(status(), agents=looks(GIB, 1.04 * GIB, 1.03 * GIB)),
    ),
    "memory, a little": (
        Problem.MEMORY_GROWS,
        evidence(status(), agents=looks(GIB, 1.01 * GIB, 1.021 * GIB)),
        evidence(status(), agents=looks(GIB, 1.01 * GIB, 1.019 * GIB)),
    ),
    "no memory": (
        Problem.MEMORY_GROWS,
        evidence(status(**out_of_memory(600))),
        evidence(status(**out_of_memory(3700))),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_problem_is_found_from_its_threshold_on(case: str) -> None:
    problem, wrong, right = CASES[case]
    assert found(wrong) == [problem]
    assert problem not in found(right)


def test_each_check_and_problem_has_its_case() -> None:
    heard = {finding.problem for _, seen, _ in CASES.values() for finding in diagnose(seen).findings}
    assert heard == set(Problem)
    silent = [check for check in CHECKS if not any(check(seen) for _, seen, _ in CASES.values())]
    assert silent == []


def test_what_began_late_is_seen_in_the_last_seconds_alone() -> None:
    earlier = status(goodput=Goodput(productive_seconds=7000, at=ago(16)))
    now = status(goodput=Goodput(productive_seconds=7005, input_seconds=10, at=ago(1)))
    assert found(evidence(now)) == []
    (finding,) = diagnose(evidence(now, earlier=earlier)).findings
    assert (finding.problem, round(finding.lost, 3)) == (Problem.INPUT_BOTTLENECK, 0.667)
    assert "67% of the training in the last 15s" in finding.sentence


def test_a_straggler_is_named() -> None:
    mark = StragglerMark(rank=3, replica="a-3-0", node="n3", seconds=0.9, others_seconds=0.3, since=ago(60))
    (finding,) = diagnose(evidence(status(stragglers=(mark,)))).findings
    assert (
        "rank 3 (replica a-3-0 on node n3) takes 0.9 s of its own work per step, and the other ranks take 0.3 s"
        in finding.sentence
    )
    assert "n3" in finding.advice


def test_the_most_costly_comes_first_and_what_is_critical_before_all() -> None:
    spent = seconds(productive=50, input=15, checkpoint=30, straggler=12)
    findings = diagnose(evidence(status(goodput=spent, restarts=restarted(0)))).findings
    assert [finding.problem for finding in findings] == [
        Problem.RESTARTS_NEARLY_USED,
        Problem.SLOW_CHECKPOINT,
        Problem.INPUT_BOTTLENECK,
        Problem.STRAGGLER,
    ]
    assert findings[0].severity is Severity.CRITICAL


def test_what_it_costs_is_said_in_money_too() -> None:
    seen = evidence(status(goodput=seconds(productive=50, input=50)), spec=spec(price={"perReplicaHour": "10"}))
    (finding,) = diagnose(seen).findings
    assert cost(finding, seen.hourly, "EUR") == "it costs 30 s of each minute, 10.00 EUR an hour"


@pytest.mark.parametrize("limit", [None, "1200Mi"])
def test_memory_is_measured_by_its_limit(limit: str | None) -> None:
    resources = {"limits": {"memory": limit}} if limit else {}
    container = {"name": "trainer", "image": "i", "resources": resources}
    seen = evidence(
        status(), spec=spec(template={"spec": {"containers": [container]}}), agents=looks(GIB, 1.01 * GIB, 1.03 * GIB)
    )
    (finding,) = diagnose(seen).findings
    assert ("the limit of 1200 MiB is reached in 2 min" if limit else "it is twice that in 11 min") in finding.sentence


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_status_without_anything_is_no_problem_to_any(check: Callable[[JobEvidence], object]) -> None:
    check(JobEvidence(spec=None, status=JobStatus(), at=NOW, created=NOW))


def test_a_job_whose_replicas_fail_at_once_is_advised_about_the_failure_and_not_about_nodes() -> None:
    failure = LastFailure(at=ago(5), reason="StartFailed", message="The command 'pyton' can't be started", round=1)
    waiting = status("Waiting", goodput=seconds(waiting=60, startup=10), last_failure=failure)
    finding = diagnose(evidence(waiting)).findings[0]
    assert finding.problem is Problem.WORLD_BELOW_MINIMUM
    assert "StartFailed: The command 'pyton'" in finding.sentence
    assert finding.advice.startswith("fix the cause of the last failure")
