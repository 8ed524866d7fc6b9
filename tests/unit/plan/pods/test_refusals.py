"""Pods that the API server refuses: a person is told of permanent reasons, and one pod is tried at a time."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from builders import jobs
from builders.jobs import T0
from concertina.kube.errors import Conflict, Forbidden, Invalid, WebhookFailed, from_status
from concertina.kube.parse.refusals import refusal
from concertina.plan.actions import CreatePod, CreateRendezvous, Plan
from concertina.plan.observed import CreateRefusal, JobObservation, Refusal
from concertina.plan.plan import plan

TYPO = 'Pod in version "v1" cannot be handled as a Pod: strict decoding error: unknown field "spec.nodeSelectorr"'
WAITS = (Refusal.QUOTA, Refusal.TRANSIENT, Refusal.PERMISSION)


def refused(kind: Refusal = Refusal.PERMANENT, since: float = T0, at: float = T0) -> CreateRefusal:
    return CreateRefusal(kind, TYPO, since, at)


def started(made: Plan) -> list[tuple[int, int]]:
    return [(action.index, action.attempt) for action in made.actions if isinstance(action, CreatePod)]


def condition(made: Plan, type: str) -> tuple[str, str]:
    condition = made.status.condition(type)
    return (condition.status, condition.reason) if condition else ("False", "")


def first_pass(refused: CreateRefusal, **fields: Any) -> Plan:
    return plan(jobs.observed(jobs.job(jobs.spec(**fields)), refused=refused), refused.at + 0.1)


def test_a_job_whose_pods_are_refused_for_good_is_stalled_in_the_servers_words() -> None:
    made = first_pass(refused())
    assert condition(made, "Stalled") == ("True", "PodRefused")
    assert condition(made, "Ready") == ("False", "Stalled")
    stalled = made.status.condition("Stalled")
    assert stalled is not None
    assert TYPO in stalled.message
    assert "spec.suspend" in stalled.message
    assert [event.reason for event in made.events] == ["PodRefused"]


@pytest.mark.parametrize("kind", WAITS)
def test_what_time_mends_is_waited_for(kind: Refusal) -> None:
    made = first_pass(refused(kind, at=T0 + 600))
    assert condition(made, "Stalled")[0] == "False"
    assert condition(made, "Ready") == ("False", "Waiting")


@pytest.mark.parametrize("kind", [Refusal.MISSING, Refusal.WEBHOOK])
def test_what_may_only_be_late_is_told_from_the_second_try_on(kind: Refusal) -> None:
    assert condition(first_pass(refused(kind)), "Stalled")[0] == "False"
    assert condition(first_pass(refused(kind, at=T0 + 5)), "Stalled") == ("True", "PodRefused")


def test_only_one_pod_is_tried_while_they_are_refused() -> None:
    for kind in Refusal:
        seen = jobs.observed(jobs.job(jobs.spec()), refused=refused(kind))
        assert started(plan(seen, T0 + 5)) == [(0, 0)]
    assert started(plan(jobs.observed(jobs.job(jobs.spec())), T0)) == [(0, 0), (1, 0), (2, 0)]


def test_what_is_refused_for_good_is_tried_ever_more_rarely() -> None:
    """As in the shell, the job is planned again when the plan says so, and each try is refused."""
    now, tries = T0, [T0]
    while now < T0 + 3600:
        made = plan(jobs.observed(jobs.job(jobs.spec()), refused=refused(at=tries[-1])), now)
        if started(made):
            tries.append(now)
        now += made.recheck_after or 0.0
    pauses = [after - before for before, after in itertools.pairwise(tries)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (5.0, 300.0)
    assert len(pauses) < 25


def test_a_clock_that_is_set_back_delays_no_try() -> None:
    seen = jobs.observed(jobs.job(jobs.spec()), refused=refused(Refusal.QUOTA, at=T0 + 3600))
    assert started(plan(seen, T0)) == [(0, 0)]


def training(kind: Refusal = Refusal.PERMANENT) -> JobObservation:
    """Return a job in which two replicas train, and the pod of the third is refused."""
    seen = jobs.running(jobs.spec(replicas=2), count=2)
    return replace(seen, job=replace(seen.job, spec=jobs.spec()), refused=refused(kind, at=T0 + 20))


def test_a_job_that_trains_goes_on_and_a_person_is_told_once() -> None:
    made = plan(training(), T0 + 21)
    assert condition(made, "Ready") == ("False", "Training"), "a replica is missing"
    assert condition(made, "Degraded") == ("True", "PodRefused")
    assert [event.reason for event in made.events] == ["PodRefused"]
    again = plan(jobs.then(training(), made), T0 + 22)
    assert condition(again, "Degraded") == ("True", "PodRefused")
    assert again.events == ()
    assert plan(training(Refusal.QUOTA), T0 + 21).status.trouble is None


def test_a_refusal_of_a_pod_that_is_no_longer_wanted_is_past() -> None:
    seen = replace(jobs.running(jobs.spec()), refused=refused(at=T0 + 20))
    assert plan(seen, T0 + 21).status.trouble is None


def test_torchruns_pods_are_refused_alike() -> None:
    seen = jobs.observed(jobs.job(jobs.command_spec(launcher="Torchrun")))
    seen = jobs.then(seen, plan(seen, T0), refused=refused())
    made = plan(seen, T0 + 1)
    assert condition(made, "Stalled") == ("True", "PodRefused")
    assert made.actions == ()
    assert [type(action) for action in plan(seen, T0 + 5).actions] == [CreateRendezvous]
    store = jobs.pod(None, 1, name="demo-rendezvous-1", round=1)
    assert started(plan(replace(seen, pods=(store,)), T0 + 5)) == [(0, 0)]


SA = 'pods "a-0-0" is forbidden: error looking up service account n/trainer: serviceaccount "trainer" not found'
QUOTA = 'pods "a-0-0" is forbidden: exceeded quota: few, requested: pods=1, used: pods=1, limited: pods=1'
NEW_CRD = (
    'secrets "a-concertina-8cb90ce7" is forbidden: cannot set blockOwnerDeletion in this case because cannot find '
    "RESTMapping for APIVersion concertina.dev/v1beta1 Kind TrainingJob: no matches for kind"
)
BROKEN = 'Internal error occurred: failed calling webhook "w": failed to call webhook: service "w" not found'
SENTENCES = [
    (403, "Forbidden", QUOTA, Refusal.QUOTA),
    (403, "Forbidden", 'pods "a-0-0" is forbidden: status unknown for quota: few, resources: pods', Refusal.QUOTA),
    (
        403,
        "Forbidden",
        'pods "a-0-0" is forbidden: failed quota: q: must specify limits.cpu for: trainer',
        Refusal.PERMANENT,
    ),
    (
        409,
        "Conflict",
        'Operation cannot be fulfilled on resourcequotas "few": the object has been modified',
        Refusal.TRANSIENT,
    ),
    (403, "Forbidden", 'pods "a-0-0" is forbidden: not yet ready to handle request', Refusal.TRANSIENT),
    (403, "Forbidden", NEW_CRD, Refusal.PERMISSION),
    (
        403,
        "Forbidden",
        'pods is forbidden: User "u" cannot create resource "pods" in API group "" in the namespace "n"',
        Refusal.PERMISSION,
    ),
    (403, "Forbidden", SA, Refusal.MISSING),
    (403, "Forbidden", 'pods "a-0-0" is forbidden: no PriorityClass with name high was found', Refusal.MISSING),
    (403, "Forbidden", 'pods "a-0-0" is forbidden: violates PodSecurity "restricted:latest": x', Refusal.PERMANENT),
    (403, "Forbidden", 'admission webhook "w" denied the request: no', Refusal.PERMANENT),
    (
        422,
        "Invalid",
        "pods \"a-0-0\" is forbidden: ValidatingAdmissionPolicy 'p' denied request: no",
        Refusal.PERMANENT,
    ),
    (422, "Invalid", 'Pod "a-0-0" is invalid: spec.volumes[1].name: Duplicate value: "v"', Refusal.PERMANENT),
    (400, "BadRequest", TYPO, Refusal.PERMANENT),
    (500, "InternalError", BROKEN, Refusal.WEBHOOK),
]


@pytest.mark.parametrize(("status", "reason", "message", "kind"), SENTENCES)
def test_the_api_servers_sentences(status: int, reason: str, message: str, kind: Refusal) -> None:
    error = from_status(
        status, json.dumps({"reason": reason, "message": message, "details": {"kind": "pods"}}).encode()
    )
    assert isinstance(error, Conflict | Forbidden | Invalid | WebhookFailed)
    assert refusal(error) is kind
