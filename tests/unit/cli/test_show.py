"""Output of `concertina status JOB`."""

import re
from dataclasses import replace
from typing import Any

from rich.console import Console

from concertina.api.accounting import Goodput, Incident, RecoveryTime
from concertina.api.loss_history import LossHistory, Point
from concertina.api.restarts import LastFailure, Restarts
from concertina.api.status import (
    CheckpointEvery,
    Condition,
    DamagedCheckpoint,
    GangMark,
    JobProgress,
    JobStatus,
    RollbackMark,
    SampleRange,
    SettingMark,
    ShareMark,
    rfc3339,
    unix_seconds,
)
from concertina.api.world import Member, World
from concertina.cli import checkpoint, jobs
from concertina.terminal.show import detail, members
from concertina_protocol import MemberState, Progress, Report


def said(status: JobStatus) -> str:
    job = {"metadata": {"namespace": "team", "name": "a"}, "spec": {"replicas": 2}, "status": status.manifest()}
    console = Console(width=300)
    with console.capture() as captured:
        console.print(detail(job))
    return captured.get()


def test_what_was_undone_what_is_left_out_and_how_often_it_is_saved() -> None:
    back = RollbackMark(round=3, step=50, reason="LossSpike", message="The loss is 9.", at=rfc3339(1_800_000_000))
    ranges = (SampleRange(begin=8, end=16), SampleRange(begin=40, end=44))
    every = CheckpointEvery(seconds=90, suggested_seconds=90, save_seconds=0.25, failure_seconds=3600)
    failed = Restarts(total=1)
    text = said(JobStatus(rollback=back, skipped=ranges, checkpoint_interval=every, restarts=failed))
    assert "from round 3 to step 50 or an earlier one: The loss is 9." in text
    assert "samples 8 to 15, 40 to 43" in text
    assert (
        "every 1m30s by the clock; the best interval is 1m30s (a save costs 0.25 s, a failure comes every 1h)" in text
    )
    by_steps = every.model_copy(update={"seconds": 0.0})
    assert "by steps alone; the best interval is 1m30s" in said(
        JobStatus(checkpoint_interval=by_steps, restarts=failed)
    )
    assert "the best interval is" not in said(JobStatus(checkpoint_interval=every)), "nothing has failed yet"
    bad = DamagedCheckpoint(uri="s3://b/run/u1/round-1/step-60", step=60, previous_step=40, at=rfc3339(1_800_000_000))
    damage = back.model_copy(update={"reason": "Damaged"})
    text = said(JobStatus(damaged_checkpoints=(bad,), rollback=damage))
    assert "s3://b/run/u1/round-1/step-60 (step 60): training continued from step 40 or an earlier one" in text
    assert "Rolled back" not in text
    plain = said(JobStatus())
    assert not any(word in plain for word in ("Rolled back", "Left out", "the best interval is"))


def test_of_a_newer_operators_status_is_shown_what_can_be_read() -> None:
    back = RollbackMark(round=3, step=50, reason="LossSpike", message="The loss is 9.", at=rfc3339(1_800_000_000))
    newer = {
        **JobStatus(rollback=back).manifest(),
        "world": {"copies": "Galaxy", "round": 7},
        "restarts": {"total": "x"},
    }
    job = {"metadata": {"name": "a", "namespace": "b"}, "spec": {"replicas": 2}, "status": newer}
    console = Console(width=300)
    with console.capture() as captured:
        console.print(detail(job))
    text = captured.get()
    assert "round 7" in text
    assert "The loss is 9." in text


def test_what_others_have_written_is_shown_as_it_is() -> None:
    """Such texts are a script's last lines, a label, or a node's reason. They are not interpreted as markup."""
    words = "[/red] [link=a] :boom: [bold]no"
    back = RollbackMark(round=3, step=50, reason="LossSpike", message=words, at=rfc3339(1_800_000_000))
    job = {"metadata": {"name": "a", "namespace": "b"}, "spec": {"replicas": 2}}
    for console in (jobs.console, checkpoint.console):
        with console.capture() as captured:
            console.print(detail({**job, "status": JobStatus(rollback=back).manifest()}), width=300)
        assert words in captured.get()


def test_the_model_that_was_read_is_no_choice_of_the_trainer() -> None:
    read = SettingMark(field="model.hf", value="olmoe with 16 layers and 6,919,161,856 weights")
    text = said(JobStatus(settings=(SettingMark(field="microBatchSize", value="2"), read)))
    assert re.search(r"Model +olmoe with 16 layers and 6,919,161,856 weights \(model\.hf\) *\n", text)
    assert re.search(r"Chosen +microBatchSize 2 *\n", text)
    assert "Chosen" not in said(JobStatus(settings=(read,)))


def test_who_computes_how_much_where_that_follows_speed() -> None:
    shares = tuple(ShareMark(replica=f"a-{i}-0", sequences=4 + i, factor=0.5 + i / 8) for i in range(5))
    text = said(JobStatus(batch_assignment=shares[:2]))
    assert "smallest share first: a-0-0 4 (0.50 of an even share), a-1-0 5 (0.62 of an even share)\n" in text
    assert "a-3-0 7 (0.88 of an even share), ..." in said(JobStatus(batch_assignment=shares))
    assert "Shares" not in said(JobStatus())


def test_a_failure_is_said_once_and_what_the_worker_printed_last_once_below_it() -> None:
    at = rfc3339(1_800_000_000)
    error = "RuntimeError: [/data] is empty"
    message = f"Rank 0 exited with code 1: {error}"
    lines = ("[rank0]: Traceback (most recent call last):", "[rank0]:     read()", f"[rank0]: {error}")
    last_failure = LastFailure(
        at=at, round=2, replica="a-0-1", node="node-1", reason="WorkerFailed", message=message, last_lines=lines
    )

    def conditions(running: str) -> tuple[Condition, ...]:
        status = {"Ready": "False", "Running": running, "Failed": "True", "Stalled": "True"}
        return tuple(
            Condition(type=type, status=status[type], reason="WorkerFailed", message=message, last_transition_time=at)
            for type in status
        )

    text = said(JobStatus(conditions=conditions("False"), last_failure=last_failure))
    assert text.count(message) == 1
    assert "a-0-1 on node-1, round 2," in text
    assert "\n".join(f"  {line}" for line in lines) in text
    assert text.count(error) == 2, "at the top, and at the end of the last lines"
    trains = said(JobStatus(conditions=conditions("True"), last_failure=last_failure))
    assert ("a-0-1 on node-1, round 2," in trains, "Traceback" in trains) == (True, False)


def test_members_with_their_ranks_as_pods_and_their_coordinator_tell_of_them() -> None:
    def pod(uid: str) -> dict[str, Any]:
        return {"metadata": {"uid": uid}, "spec": {"nodeName": "node-7"}, "status": {"phase": "Running"}}

    world = World(
        round=3,
        members=tuple(
            Member(replica=f"a-{index}-0", uid=f"0000000{index}~", instance="i", workers=2) for index in range(3)
        ),
    )
    pods = {"a-0-0": pod("00000000-1111"), "a-1-0": pod("another one's")}
    told = {"a-0-0": MemberState("a-0-0", "i", 3, "c", "running", step=41, notice=20.0)}
    report = Report("a-0-0", "i", True, 3, "c", "running", members=told)

    def said(report: Report | None) -> list[list[str]]:
        console = Console(width=300)
        with console.capture() as captured:
            console.print(members(world, pods, report))
        return [line.split() for line in captured.get().splitlines()]

    assert said(report) == [
        ["Ranks", "Replica", "Node", "Pod", "State", "Step"],
        ["0-1", "a-0-0", "node-7", "Running", "running,", "has", "20", "s", "left", "41"],
        ["2-3", "a-1-0", "Gone"],
        ["4-5", "a-2-0", "Gone"],
    ]
    assert said(None)[1] == ["0-1", "a-0-0", "node-7", "Running"]
    trains = {"a-0-0": MemberState("a-0-0", "i", 3, "c", "running")}
    training = replace(report, members=trains, progress=Progress(57, None, 2.5, 100.0, 0.1, 570, "training", 0.0))
    assert said(training)[1] == ["0-1", "a-0-0", "node-7", "Running", "running", "57"]
    assert said(replace(report, round=2)) == said(None)


def test_the_run_over_time_and_where_its_time_went() -> None:
    points = tuple(Point(1_800_000_000 + 10 * at, at, 4.0 - at, 4 - at // 2) for at in range(4))
    spent = Goodput(percent=75, productive_seconds=75, recovery_seconds=25, at=rfc3339(1_800_000_000))
    text = said(JobStatus(history=LossHistory(2, points).packed(), goodput=spent))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "Loss █▆▃▁ 4 to 1 in 30s" in lines
    assert "Replicas ██▆▆ 3 to 4 in 30s" in lines
    assert f"Time productive 1m15s 75.0% {'█' * 30}" in lines
    assert f"recovery 25s 25.0% {'█' * 10}" in lines
    short = said(JobStatus(history=LossHistory(2, points[:1]).packed()))
    assert "Loss" not in short, "a point is no curve"
    assert "Loss" not in said(JobStatus(history="what it is not"))


def test_the_goodput_of_a_script_that_reports_no_steps_is_unknown() -> None:
    at, recovery = rfc3339(1_800_000_000), (RecoveryTime(cause="WorkerSignaled", times=2, seconds=4.1),)
    spent = Goodput(unknown_seconds=150, recovery_seconds=4.1, recovery=recovery, at=at)
    lost = Incident(at=at, cause="WorkerSignaled", seconds=2.0, at_least=True)
    lines = [" ".join(line.split()) for line in said(JobStatus(goodput=spent, incidents=(lost,))).splitlines()]
    assert "Goodput unknown: the script has reported no step (see docs/accounting.md)" in lines
    assert f"Time unknown 2m30s 97.3% {'█' * 30}" in lines
    assert "recovery by cause: WorkerSignaled 2 x, at least 4.1s" in lines
    assert any(line.endswith("WorkerSignaled: at least 2.0s without training") for line in lines)
    known = Goodput(percent=90, productive_seconds=90, unknown_seconds=50, waiting_seconds=10, at=at)
    assert "90.0% of the time was spent on new steps (suspended and unknown time excluded)" in said(
        JobStatus(goodput=known)
    )


def test_the_last_events_are_there_the_newest_last_and_as_they_are() -> None:
    def event(number: int) -> dict[str, Any]:
        at = rfc3339(1_800_000_000 + number)
        return {"type": "Normal", "reason": f"R{number}", "message": "[red]\nwords", "count": 1, "lastTimestamp": at}

    job = {"metadata": {"namespace": "team", "name": "a"}, "spec": {"replicas": 2}}
    with jobs.console.capture() as captured:
        jobs.console.print(detail(job, [event(number) for number in (10, 3, *range(4, 10))] + [{}]), width=200)
    lines = captured.get().splitlines()
    assert [line.split()[1] for line in lines if "[red] words" in line] == [f"R{number}" for number in range(3, 11)]


def test_the_gang_is_shown_with_its_minimum_or_the_reason_why_there_is_none() -> None:
    gang = GangMark(mechanism="PodGroup", api_version="scheduling.k8s.io/v1beta1", pod_group="demo", min_count=2)
    assert "PodGroup: 2 pods together" in said(JobStatus(gang=gang))
    assert "none; the API is not served" in said(JobStatus(gang=GangMark(message="the API is not served")))
    assert "Gang" not in said(JobStatus())


def test_the_layout_and_what_it_crosses() -> None:
    assert "Layout" not in said(JobStatus())
    text = said(
        JobStatus(world=World(layout="shard 4 x tensor 2", cross_domain_groups="1 of 4 tensor groups cross rack"))
    )
    assert "shard 4 x tensor 2; 1 of 4 tensor groups cross rack" in text


def test_who_does_not_train_has_no_pace_and_only_conditions_that_say_something_are_shown() -> None:
    def status(holds: str) -> JobStatus:
        kinds = ("Ready", "Running", "Complete", "Failed")
        conditions = [
            Condition(type=kind, status="True" if kind in ("Ready", holds) else "False", reason=f"{kind}Reason",
                      last_transition_time=rfc3339(1_800_000_000))
            for kind in kinds
        ]  # fmt: skip
        at = rfc3339(1_800_000_000)
        reported = JobProgress(step=5, steps=10, percent=50, loss=2.0, eta_seconds=60, tokens_per_second=100, at=at)
        return JobStatus(conditions=tuple(conditions), progress=reported)

    trains, over = said(status("Running")), said(status("Complete"))
    assert "loss 2  tokens/s 100  ETA 1m" in trains
    assert "RunningReason" in trains
    assert "loss 2" in over
    assert not any(word in over for word in ("tokens/s", "ETA", "RunningReason", "FailedReason"))


def test_time_at_rest_counts_until_now() -> None:
    """The operator counts the time of a job that waits at its next event."""
    counted = Goodput(waiting_seconds=2.0, productive_seconds=8.0, percent=80.0, at="2026-01-01T00:00:00Z")
    now = unix_seconds("2026-01-01T00:00:30Z")
    for reason, expected in (("Waiting", 32.0), ("Training", 2.0)):
        ready = Condition(type="Ready", status="False", reason=reason, lastTransitionTime="2026-01-01T00:00:00Z")
        goodput = JobStatus(conditions=(ready,), goodput=counted).counted_until(now).goodput
        assert (goodput.waiting_seconds, goodput.percent) == (expected, 80.0 if expected == 2.0 else 20.0)
