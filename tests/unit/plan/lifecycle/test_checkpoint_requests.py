"""Checkpoint that a person requests by an annotation."""

from __future__ import annotations

from dataclasses import replace

import concertina_protocol as protocol
from builders import jobs
from concertina.plan.observed import Call, JobObservation
from concertina.plan.plan import plan
from concertina_protocol import Durable, Progress, Storage

STORED = {"checkpoint": {"uri": "s3://bucket/run"}}


def asked(request: str = "r1", step: int = 40, durable: int = 0, **spec: object) -> JobObservation:
    """Return a job that trains, at `step`, with a checkpoint of step `durable`."""
    seen = jobs.running(jobs.spec())
    job = replace(seen.job, spec=jobs.job(jobs.spec(**{**STORED, **spec})).spec, checkpoint_request=request)
    progress = Progress(step, 100, 1.0, 1.0, 1.0, step, "training", jobs.T0, first_step_at=jobs.T0)
    latest = Durable(seen.job.uid, 1, durable, "s3://bucket/run/x", at=jobs.T0) if durable else None
    report = jobs.coordinator_report(progress=progress, storage=Storage("Ready", latest))
    agents = {**seen.agents, "demo-0-0": replace(seen.agents["demo-0-0"], report=report)}
    return replace(seen, agents=agents, job=job)


def test_the_coordinator_is_asked_once_a_round_until_a_later_step_is_durable() -> None:
    seen = asked(durable=40)
    made = plan(seen, jobs.T0 + 100)
    assert made.status.checkpoint_request is not None
    assert (made.status.checkpoint_request.state, made.status.checkpoint_request.step) == ("Pending", 41)
    message = jobs.sends(made, protocol.Save)["demo-0-0"]
    assert (message.round, message.request) == (1, "r1")

    told = replace(seen.agents["demo-0-0"], save=Call(1, message.claim, 0.0, request="r1"))
    seen = jobs.then(replace(seen, agents={**seen.agents, "demo-0-0": told}), made)
    assert jobs.sends(plan(seen, jobs.T0 + 101), protocol.Save) == {}
    failed = replace(told, save=replace(told.save, error="gone"))
    again = replace(seen, agents={**seen.agents, "demo-0-0": failed})
    assert "demo-0-0" in jobs.sends(plan(again, jobs.T0 + 101), protocol.Save)

    later = asked(step=50, durable=45)
    later = replace(later, job=replace(later.job, status=made.status))
    done = plan(later, jobs.T0 + 102)
    assert done.status.checkpoint_request is not None
    assert done.status.checkpoint_request.state == "Done"
    assert "step 45 is in s3://bucket/run/x" in done.status.checkpoint_request.message
    assert jobs.sends(done, protocol.Save) == {}
    anew = replace(later, job=replace(later.job, status=done.status, checkpoint_request="r2"))
    assert jobs.sends(plan(anew, jobs.T0 + 103), protocol.Save)["demo-0-0"].request == "r2"


def test_a_job_without_storage_says_why_not() -> None:
    made = plan(asked(checkpoint=None), jobs.T0 + 100)
    assert made.status.checkpoint_request is not None
    assert made.status.checkpoint_request.state == "Refused"
    assert "no durable checkpoints" in made.status.checkpoint_request.message
    assert jobs.sends(made, protocol.Save) == {}
