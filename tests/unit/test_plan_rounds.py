"""A job's way from its first pods to its end, pass by pass, and what a failure leads to."""

from __future__ import annotations

from dataclasses import replace

from builders import jobs
from builders.jobs import T0
from concertina.plan.plan import plan
from concertina.plan.types import CreatePod
from concertina_agent import protocol


def phase(made: object) -> str:
    return made.status.condition("Ready").reason


def test_a_new_job_gets_its_pods_and_secret() -> None:
    made = plan(jobs.observed(jobs.job(jobs.spec()), secret_made=False), T0)
    assert [type(action).__name__ for action in made.actions] == ["CreateSecret"] + ["CreatePod"] * 3
    assert [action.index for action in made.actions if isinstance(action, CreatePod)] == [0, 1, 2]
    assert phase(made) == "Waiting"
    assert made.status.world.claim is None


def test_from_ready_agents_to_training_takes_a_claim_a_commit_and_nothing_else() -> None:
    pods = tuple(jobs.pod(index) for index in range(3))
    agents = {pod.name: jobs.agent(pod.name) for pod in pods}
    seen = jobs.observed(jobs.job(jobs.spec()), pods, agents)

    made = plan(seen, T0 + 1)
    assert made.status.world.claim.round == 1
    assert not made.status.world.claim.committed
    prepares = jobs.sends(made, protocol.Prepare)
    assert sorted(prepares) == ["demo-0-0", "demo-1-0", "demo-2-0"]
    assert not jobs.sends(made, protocol.Assign)

    agents = {
        name: jobs.called(agents[name], message, T0 + 1, done_at=T0 + 1, reply=jobs.prepared(name, message))
        for name, message in prepares.items()
    }
    seen = jobs.then(seen, made, agents=agents)
    made = plan(seen, T0 + 1.1)
    world = made.status.world
    assert (world.round, world.lead, world.workers, world.claim.committed) == (1, "demo-0-0", 3, True)
    assigns = jobs.sends(made, protocol.Assign)
    assert sorted(assigns) == ["demo-0-0", "demo-1-0", "demo-2-0"]
    assert {message.restore.source for message in assigns.values()} == {"Fresh"}
    assert [member.first_rank for member in assigns["demo-0-0"].members] == [0, 1, 2]

    seen = jobs.running(jobs.spec())
    made = plan(seen, T0 + 10)
    assert phase(made) == "Training"
    assert made.actions == ()
    assert made.watch == {"demo-0-0": "127.0.0.1:29400"}
    assert made.status is seen.job.status


def test_success_completes_the_job() -> None:
    made = plan(jobs.running(jobs.spec(), state="succeeded"), T0 + 11)
    assert phase(made) == "Complete"
    assert made.status.completion_time


def test_a_failed_worker_leads_to_a_round_of_the_same_members_at_once() -> None:
    failure = protocol.Failure("demo-1-0", "WorkerFailed", "exit code 1", ("Traceback", "ValueError: no"), at=T0 + 11)
    seen = jobs.running(jobs.spec())
    lead = replace(seen.agents["demo-0-0"], report=jobs.lead_report(failures=(failure,), state="running"))
    made = plan(replace(seen, agents={**seen.agents, "demo-0-0": lead}), T0 + 11)
    assert made.status.world.claim.round == 2
    assert made.status.world.round == 1
    assert sorted(jobs.sends(made, protocol.Prepare)) == ["demo-0-0", "demo-1-0", "demo-2-0"]
    assert "ValueError: no" in made.status.condition("Running").message
    assert made.status.restarts.in_window == 1
    assert made.events[0].type == "Warning"
