"""Sentences that say why replicas are not ready."""

from __future__ import annotations

from dataclasses import replace

from builders import jobs
from builders.jobs import T0
from concertina.plan.plan import plan


def test_a_pod_that_no_scheduler_looks_at_names_the_scheduler_after_some_seconds() -> None:
    pod = jobs.pod(0, phase="Pending", node="", ip="", awaited_scheduler="volcano")
    seen = jobs.observed(jobs.job(jobs.command_spec(replicas=1, elastic=None)), (pod,))
    young = plan(replace(seen, seen_for={pod.uid: 1.0}), T0 + 1)
    message = young.status.conditions[0].message
    assert message == "0 of 1 replicas are ready, 1 is needed; demo-0-0: starts"
    assert young.recheck_after == 4.0
    old = plan(replace(seen, seen_for={pod.uid: 5.0}), T0 + 5)
    assert old.status.conditions[0].message.endswith(
        "; demo-0-0: no scheduler has looked at it so far: is volcano running?"
    )
    looked_at = replace(pod, awaited_scheduler="")
    there = plan(replace(seen, pods=(looked_at,), seen_for={pod.uid: 5.0}), T0 + 5)
    assert there.status.conditions[0].message.endswith("; demo-0-0: starts")
