"""Order of members by their locations, and the distance of copies in the status."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from builders import jobs
from concertina.plan.actions import Plan
from concertina.plan.observed import JobObservation, NodeView
from concertina.plan.plan import plan
from concertina_protocol import Assign, Prepare


def committed(places: list[tuple[str, str]], spec: Any = None) -> tuple[JobObservation, Plan]:
    """Return the observation and the plan that commits the first round of replicas on these nodes, in these zones."""
    pods = tuple(jobs.pod(index, node=node) for index, (node, _) in enumerate(places))
    agents = {pod.name: jobs.agent(pod.name) for pod in pods}
    seen = jobs.observed(jobs.job(spec or jobs.spec(replicas=len(places))), pods, agents)
    seen = replace(seen, nodes={node: NodeView(node, ready=True, zone=zone) for node, zone in places})
    made = plan(seen, jobs.T0 + 10)
    for name, message in jobs.sends(made, Prepare).items():
        reply = jobs.prepared(name, message)
        agents[name] = jobs.called(agents[name], message, jobs.T0 + 10, done_at=jobs.T0 + 10, reply=reply)
    seen = jobs.then(seen, made, agents=agents)
    return seen, plan(seen, jobs.T0 + 10)


def told(made: Plan) -> list[tuple[str, str]]:
    return [(event.type, event.message) for event in made.events if event.reason.startswith("CopiesShare")]


def test_neighbours_are_in_different_zones() -> None:
    _, made = committed([("n0", "a"), ("n1", "a"), ("n2", "b"), ("n3", "b")])
    world = made.status.world
    assert [member.node for member in world.members] == ["n0", "n2", "n1", "n3"]
    assert (world.copies, told(made)) == ("Zone", [])
    assigned = jobs.sends(made, Assign)["demo-0-0"].members
    assert [member.replica for member in assigned] == [member.replica for member in world.members]
    assert [(member.node, member.zone) for member in assigned] == [("n0", "a"), ("n2", "b"), ("n1", "a"), ("n3", "b")]


def test_a_zone_with_too_many_is_told() -> None:
    _, made = committed([("n0", "a"), ("n1", "a"), ("n2", "a"), ("n3", "b")])
    assert made.status.world.copies == "Node"
    [(kind, message)] = told(made)
    assert kind == "Normal"
    assert message.startswith("2 of 4 replicas have the copy of their snapshots in the same zone"), message


def test_a_node_with_too_many_is_told_once() -> None:
    seen, made = committed([("n0", ""), ("n0", ""), ("n1", "")])
    assert made.status.world.copies == "SameNode"
    [(kind, message)] = told(made)
    assert (kind, message.split(":")[0]) == (
        "Warning",
        "1 of 3 replicas have the copy of their snapshots in the same node",
    )
    status = made.status.model_copy(update={"world": seen.job.status.world.model_copy(update={"copies": "SameNode"})})
    again = plan(replace(seen, job=replace(seen.job, status=status)), jobs.T0 + 10)
    assert again.status.world.members
    assert told(again) == []


def test_one_zone_for_all_and_one_member_are_as_wanted() -> None:
    _, made = committed([("n0", "a"), ("n1", "a")])
    assert (made.status.world.copies, told(made)) == ("Node", [])
    _, made = committed([("n0", "a")], jobs.spec(replicas=1, elastic=None))
    assert (made.status.world.copies, told(made)) == ("None", [])


def test_a_command_of_ones_own_keeps_the_order_of_indexes() -> None:
    _, made = committed([("n0", "a"), ("n0", "a"), ("n1", "b")], jobs.command_spec())
    assert [member.replica for member in made.status.world.members] == ["demo-0-0", "demo-1-0", "demo-2-0"]
    assert made.status.world.copies == ""
