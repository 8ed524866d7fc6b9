"""What `concertina status JOB` says of a job."""

from rich.console import Console

from concertina.api.status import (
    CheckpointEvery,
    Condition,
    JobStatus,
    LastFailure,
    Rollback,
    SampleRange,
    ShareMark,
    rfc3339,
)
from concertina.terminal.show import detail


def said(status: JobStatus) -> str:
    job = {"metadata": {"namespace": "team", "name": "a"}, "spec": {"replicas": 2}, "status": status.manifest()}
    console = Console(width=300)
    with console.capture() as captured:
        console.print(detail(job))
    return captured.get()


def test_what_was_undone_what_is_left_out_and_how_often_it_is_saved() -> None:
    back = Rollback(round=3, step=50, reason="LossSpike", message="The loss is 9.", at=rfc3339(1_800_000_000))
    ranges = (SampleRange(begin=8, end=16), SampleRange(begin=40, end=44))
    every = CheckpointEvery(seconds=90, suggested_seconds=90, save_seconds=0.25, failure_seconds=3600)
    text = said(JobStatus(rollback=back, skipped=ranges, checkpoint_interval=every))
    assert "from round 3 to step 50 or before: The loss is 9." in text
    assert "samples 8 to 15, 40 to 43" in text
    assert "every 1m30s; best would be every 1m30s (a save costs 0.25 s, a failure comes every 1h)" in text
    by_steps = every.model_copy(update={"seconds": 0.0})
    assert "by steps alone; best would be every 1m30s" in said(JobStatus(checkpoint_interval=by_steps))
    plain = said(JobStatus())
    assert not any(word in plain for word in ("Rolled back", "Left out", "best would be"))


def test_who_computes_how_much_where_that_follows_speed() -> None:
    shares = tuple(ShareMark(replica=f"a-{i}-0", sequences=4 + i, factor=0.5 + i / 8) for i in range(5))
    text = said(JobStatus(shares=shares[:2]))
    assert "the least first: a-0-0 4 (0.50 of an even share), a-1-0 5 (0.62 of an even share)\n" in text
    assert "a-3-0 7 (0.88 of an even share), ..." in said(JobStatus(shares=shares))
    assert "Shares" not in said(JobStatus())


def test_a_failure_is_said_once_and_what_the_worker_printed_last_once_below_it() -> None:
    at = rfc3339(1_800_000_000)
    error = "RuntimeError: [/data] is empty"
    message = f"Rank 0 exited with code 1: {error}"
    lines = ("[rank0]: Traceback (most recent call last):", "[rank0]:     read()", f"[rank0]: {error}")
    told = LastFailure(
        at=at, round=2, replica="a-0-1", node="node-1", reason="WorkerFailed", message=message, last_lines=lines
    )

    def conditions(running: str) -> tuple[Condition, ...]:
        status = {"Ready": "False", "Running": running, "Failed": "True", "Stalled": "True"}
        return tuple(
            Condition(type=type, status=status[type], reason="WorkerFailed", message=message, last_transition_time=at)
            for type in status
        )

    text = said(JobStatus(conditions=conditions("False"), last_failure=told))
    assert text.count(message) == 1
    assert "a-0-1 on node-1, round 2," in text
    assert "\n".join(f"  {line}" for line in lines) in text
    assert text.count(error) == 2, "at the top, and at the end of the last lines"
    trains = said(JobStatus(conditions=conditions("True"), last_failure=told))
    assert ("a-0-1 on node-1, round 2," in trains, "Traceback" in trains) == (True, False)
