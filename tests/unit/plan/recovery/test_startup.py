"""Images and settings with which no pod can start: they are reported, and retried only if that can help."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import jobs
from builders.jobs import T0
from concertina.plan.actions import CreatePod, DeletePod, Plan
from concertina.plan.plan import plan

NO_PYTHON = {"exit_code": 128, "exit_reason": "StartError"}
NOT_FOUND = 'exec: "python3": executable file not found in $PATH: unknown'


def condition(made: Plan, type: str) -> tuple[str, str, str]:
    condition = made.status.condition(type)
    return (condition.status, condition.reason, condition.message) if condition else ("False", "", "")


def pods(**fields: Any) -> tuple[Any, ...]:
    return tuple(jobs.pod(index, **fields) for index in range(3))


@pytest.mark.parametrize(
    ("fields", "reason", "hint"),
    [
        ({**NO_PYTHON, "exit_message": NOT_FOUND}, "NoPython", "CONCERTINA_PYTHON"),
        ({"exit_code": 69, "exit_message": "the agent needs Python 3.9 or newer"}, "PythonTooOld", "Python 3.9"),
    ],
)
def test_an_image_that_cannot_run_the_agent_is_refused_in_a_sentence(
    fields: dict[str, Any], reason: str, hint: str
) -> None:
    seen = jobs.observed(jobs.job(jobs.command_spec()), pods(phase="Failed", **fields))
    made = plan(seen, T0 + 5)
    status, why, message = condition(made, "Stalled")
    assert (status, why) == ("True", reason)
    assert hint in message
    assert "spec.suspend" in message
    assert made.actions == (), "the next pod would fare no better"
    suspended = replace(seen, job=jobs.job(jobs.command_spec(suspend=True)))
    assert {type(action) for action in plan(suspended, T0 + 6).actions} == {DeletePod}


@pytest.mark.parametrize("past", [{"template_hash": "old"}, {"deleting": True}], ids=["changed since", "deleted"])
@pytest.mark.parametrize("launcher", ["Agent", "Torchrun"])
def test_a_pod_that_is_past_says_nothing_of_the_image_that_the_job_has_now(launcher: str, past: dict[str, Any]) -> None:
    job = replace(jobs.job(jobs.command_spec(replicas=1, elastic=None, launcher=launcher)), template_hash="new")
    first = jobs.observed(job)
    first = jobs.then(first, plan(first, T0))
    old = jobs.pod(0, phase="Failed", **NO_PYTHON, exit_message=NOT_FOUND, round=first.job.status.world.round, **past)
    store = jobs.pod(None, 1, name="demo-rendezvous-1", round=1, template_hash="new")
    seen = replace(first, pods=(store, old) if launcher == "Torchrun" else (old,), fresh_claim="claim-b")
    made = plan(seen, T0 + 5)
    assert condition(made, "Stalled")[0] == "False"
    assert made.actions or made.status.world.round == 2, "another pod, or another rendezvous first"
    new = jobs.pod(0, 1, phase="Failed", **NO_PYTHON, exit_message=NOT_FOUND, template_hash="new")
    made = plan(jobs.then(seen, made, pods=(old, new)), T0 + 6)
    assert condition(made, "Stalled")[1] == "NoPython"
    assert "demo-0-1 can't start" in condition(made, "Stalled")[2]


@pytest.mark.parametrize(
    "fields",
    [
        {**NO_PYTHON, "exit_message": "nvidia-container-cli: device error"},
        {"exit_code": 69, "exit_message": ""},
        {"exit_code": 1, "exit_message": NOT_FOUND},
    ],
    ids=["the node's fault", "a script's own 69", "a script that says so"],
)
def test_other_ends_are_tried_again(fields: dict[str, Any]) -> None:
    made = plan(jobs.observed(jobs.job(jobs.command_spec()), pods(phase="Failed", **fields)), T0 + 5)
    assert CreatePod in {type(action) for action in made.actions}


@pytest.mark.parametrize(
    ("waiting", "reason"),
    [("ErrImagePull", "ImageUnavailable"), ("CreateContainerConfigError", "ContainerConfigError")],
)
def test_what_a_person_must_mend_is_said_with_kubernetes_own_words(waiting: str, reason: str) -> None:
    stuck = pods(phase="Pending", waiting=waiting, waiting_message='secret "token" not found')
    made = plan(jobs.observed(jobs.job(jobs.command_spec()), stuck), T0 + 5)
    status, why, message = condition(made, "Stalled")
    assert (status, why) == ("True", reason)
    assert 'secret "token" not found' in message


def test_a_pod_that_says_nothing_for_long_gets_a_hint() -> None:
    made = plan(jobs.observed(jobs.job(jobs.command_spec()), pods(phase="Pending")), T0 + 60)
    assert "kubectl describe pod demo-0-0" in condition(made, "Running")[2]


def test_what_lingers_beside_a_sidecar_is_deleted_before_its_successor_needs_the_room() -> None:
    dead = jobs.pod(0, phase="Failed", exit_code=1, lingers=True)
    made = plan(jobs.observed(jobs.job(jobs.command_spec()), (dead, jobs.pod(1), jobs.pod(2))), T0 + 5)
    assert [action.name for action in made.actions if isinstance(action, DeletePod)] == ["demo-0-0"]
    without = replace(dead, lingers=False)
    made = plan(jobs.observed(jobs.job(jobs.command_spec()), (without, jobs.pod(1), jobs.pod(2))), T0 + 5)
    assert not [action for action in made.actions if isinstance(action, DeletePod)]
