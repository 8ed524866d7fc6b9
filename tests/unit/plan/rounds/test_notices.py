"""Announcements that a replica will leave, and the plan's response."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import concertina_protocol as protocol
from builders import jobs
from builders.jobs import T0
from concertina.plan.actions import CreatePod, DeletePod, Plan
from concertina.plan.observed import AgentView, ConnectionRefusal, JobObservation, NodeView
from concertina.plan.plan import plan

TAINT = "aws-node-termination-handler/spot-itn"


def on_node(seen: JobObservation, *numbers: int, **fields: Any) -> JobObservation:
    """Return the observation with these fields of the nodes."""
    nodes = {f"node-{n}": NodeView(f"node-{n}", ready=True, **fields) for n in numbers}
    return replace(seen, nodes={**seen.nodes, **nodes})


def pods(seen: JobObservation, *indexes: int, **fields: Any) -> JobObservation:
    """Return the observation with these fields of the pods."""
    return replace(seen, pods=tuple(replace(pod, **fields) if pod.index in indexes else pod for pod in seen.pods))


def coordinator(seen: JobObservation, **fields: Any) -> JobObservation:
    return replace(seen, agents={**seen.agents, "demo-0-0": replace(seen.agents["demo-0-0"], **fields)})


def told(seen: JobObservation, name: str, **fields: Any) -> JobObservation:
    """Return the observation in which the coordinator reports a member's notice."""
    state = protocol.MemberState(name, f"i-{name}", 1, "claim-a", "draining", **fields)
    return coordinator(seen, report=jobs.coordinator_report(members={name: state}))


def drains(made: Plan) -> list[protocol.Drain]:
    return list(jobs.sends(made, protocol.Drain).values())


def created(made: Plan) -> list[CreatePod]:
    return [action for action in made.actions if isinstance(action, CreatePod)]


def deleted(made: Plan) -> list[str]:
    return [action.name for action in made.actions if isinstance(action, DeletePod)]


RUNNING = jobs.running(jobs.spec())
URGENT = {
    "deleted": (pods(RUNNING, 1, deleting=True, deletion_at=T0 + 50), "is being deleted", 0),
    "preempted": (
        pods(RUNNING, 1, deleting=True, deletion_at=T0 + 50, disruption="PreemptionByScheduler"),
        "is being deleted (PreemptionByScheduler)",
        0,
    ),
    "disrupted": (pods(RUNNING, 1, disruption="EvictionByEvictionAPI"), "(EvictionByEvictionAPI)", 0),
    "node ends": (on_node(RUNNING, 1, notice=TAINT), f"on node node-1, whose end the taint {TAINT} announces", 1),
    "told": (told(RUNNING, "demo-1-0", notice=20.0), "received a request to stop within 20 s", 0),
}


@pytest.mark.parametrize(("seen", "words", "avoided"), URGENT.values(), ids=list(URGENT))
def test_an_urgent_notice_drains_the_round_and_asks_for_a_successor(
    seen: JobObservation, words: str, avoided: int
) -> None:
    made = plan(seen, T0 + 20)
    (drain,) = drains(made)
    assert "demo-1-0" in drain.reason
    assert words in drain.reason
    assert (drain.durable, drain.round) == (False, 1)
    (create,) = created(made)
    assert (create.index, create.attempt) == (1, 1)
    assert create.avoid_nodes == (("node-1",) if avoided else ())
    assert deleted(made) == []
    assert made.status.restarts.total == 0


def test_after_the_drain_the_round_goes_on_without_it_and_its_pod_is_deleted() -> None:
    seen = on_node(RUNNING, 1, notice=TAINT)
    made = plan(seen, T0 + 20)
    seen = coordinator(jobs.then(seen, made), report=jobs.coordinator_report(state="drained"))
    made = plan(seen, T0 + 21)
    prepares = jobs.sends(made, protocol.Prepare)
    assert sorted(prepares) == ["demo-0-0", "demo-2-0"]
    assert deleted(made) == [], "it may be needed until the next round has its members"
    agents = dict(seen.agents)
    for name, message in prepares.items():
        agents[name] = jobs.called(agents[name], message, T0 + 21, done_at=T0 + 21, reply=jobs.prepared(name, message))
    seen = jobs.then(seen, made, agents=agents)
    made = plan(seen, T0 + 21.1)
    assert [member.replica for member in made.status.world.members] == ["demo-0-0", "demo-2-0"]
    made = plan(jobs.then(seen, made), T0 + 21.2)
    assert deleted(made) == ["demo-1-0"]
    assert made.status.restarts.total == 0


def test_several_notices_are_one_drain() -> None:
    spec = jobs.spec(replicas=4)
    seen = on_node(pods(jobs.running(spec, 4), 2, deleting=True, deletion_at=T0 + 50), 1, notice=TAINT)
    made = plan(seen, T0 + 20)
    (drain,) = drains(made)
    assert "and 1 more will go" in drain.reason
    assert [(create.index, create.attempt) for create in created(made)] == [(1, 1), (2, 1)]


@pytest.mark.parametrize("who", ["demo-0-0", "demo-1-0"])
def test_who_was_told_to_stop_has_a_notice_until_its_pod_has_ended(who: str) -> None:
    """The notice also counts while the next round is formed: the member's successor stays, and the member does not."""
    spec = jobs.spec()
    seen = jobs.running(spec)
    states = {who: protocol.MemberState(who, f"i-{who}", 1, "claim-a", "drained", notice=20.0)}
    own = {"notice": 20.0} if who == "demo-0-0" else {}
    seen = coordinator(seen, report=jobs.coordinator_report(state="drained", members=states, **own))
    made = plan(seen, T0 + 20)
    assert [action.attempt for action in created(made)] == [1]
    index = int(who.split("-")[1])
    successor = jobs.pod(index, 1, created=T0 + 20)
    seen = replace(jobs.then(seen, made), pods=(*seen.pods, successor))
    seen = coordinator(seen, connected=False, lost_at=T0 + 20.1, closed=True, refusal=ConnectionRefusal.NOT_LISTENING)
    made = plan(seen, T0 + 20.2)
    assert made.status.world.claim
    assert made.status.world.claim.round == 2
    later = plan(jobs.then(seen, made), T0 + 20.4)
    assert successor.name not in deleted(made) + deleted(later)


def test_a_notice_that_is_taken_back_changes_nothing() -> None:
    cordoned = on_node(RUNNING, 1, cordoned=True)
    made = plan(cordoned, T0 + 20)
    assert [(create.index, create.attempt) for create in created(made)] == [(1, 1)]
    successor = jobs.pod(1, 1, node="node-3", ip="127.0.0.9", phase="Pending")
    back = jobs.then(RUNNING, made, pods=(*RUNNING.pods[:2], successor, RUNNING.pods[2]))
    made = plan(back, T0 + 21)
    assert drains(made) == []
    assert created(made) == []
    assert deleted(made) == ["demo-1-1"]
    made = plan(jobs.then(RUNNING, made), T0 + 22)
    assert made.actions == ()


def test_a_replica_on_a_cordoned_node_works_on_until_its_successor_is_ready() -> None:
    seen = on_node(RUNNING, 1, cordoned=True)
    made = plan(seen, T0 + 20)
    assert drains(made) == []
    assert created(made) == [CreatePod(1, 1, ("node-1",))]
    assert "which is cordoned" in made.status.condition("Running").message
    successor = jobs.pod(1, 1, node="node-3", ip="127.0.0.9")
    pods_then = (*seen.pods[:2], successor, seen.pods[2])
    seen = jobs.then(seen, made, pods=pods_then)
    made = plan(seen, T0 + 21)
    assert (drains(made), created(made), deleted(made)) == ([], [], []), "the successor is not ready yet"
    seen = jobs.then(seen, made, agents={**seen.agents, "demo-1-1": jobs.agent("demo-1-1", ready_at=T0 + 21)})
    made = plan(seen, T0 + 21.5)
    (drain,) = drains(made)
    assert "its replacement is ready" in drain.reason
    seen = coordinator(jobs.then(seen, made), report=jobs.coordinator_report(state="drained"))
    made = plan(seen, T0 + 22)
    assert sorted(jobs.sends(made, protocol.Prepare)) == ["demo-0-0", "demo-1-1", "demo-2-0"]
    assert deleted(made) == []


def test_a_successor_that_comes_to_a_node_with_a_notice_does_not_chase_another() -> None:
    """The template tolerates all taints."""
    seen = on_node(RUNNING, 1, cordoned=True)
    made = plan(seen, T0 + 20)
    successor = jobs.pod(1, 1, node="node-1", ip="127.0.0.9", created=T0 + 20)
    seen = jobs.then(seen, made, pods=(*seen.pods[:2], successor, seen.pods[2]))
    seen = replace(seen, agents={**seen.agents, "demo-1-1": jobs.agent("demo-1-1")})
    made = plan(seen, T0 + 21)
    assert (drains(made), created(made)) == ([], [])
    ending = on_node(seen, 1, notice=TAINT)
    assert created(plan(ending, T0 + 22)) == []


@pytest.mark.parametrize(
    ("grace", "save", "left"), [(30.0, 0.0, 29.0), (10.0, 4.0, 6.0), (2.0, 4.0, 1.0), (3600.0, 0.0, 30.0)]
)
def test_the_deadline_is_the_smallest_grace_less_a_save(grace: float, save: float, left: float) -> None:
    progress = protocol.Progress(40, 100, 2.5, 1.0, 0.1, 1280, "training", T0 + 10, T0 + 6, save_seconds=save)
    seen = coordinator(
        pods(jobs.running(jobs.spec(replicas=4), 4), 1, grace=grace), report=jobs.coordinator_report(progress=progress)
    )
    seen = pods(on_node(seen, 0, 1, notice=TAINT), 0, grace=3600.0)
    (drain,) = drains(plan(seen, T0 + 20))
    assert drain.grace_seconds == left


def test_a_clock_that_is_ahead_does_not_take_the_grace_away() -> None:
    late = pods(RUNNING, 1, deleting=True, grace=20.0, deletion_at=T0 - 300)
    (drain,) = drains(plan(late, T0 + 20))
    assert drain.grace_seconds == 9.0


@pytest.mark.parametrize(("leaving", "durable"), [((1,), False), ((1, 2), True), ((0, 1, 2), True)])
def test_the_state_is_saved_where_those_who_stay_cannot_go_on(leaving: tuple[int, ...], durable: bool) -> None:
    seen = pods(RUNNING, *leaving, deleting=True, deletion_at=T0 + 50)
    (drain,) = drains(plan(seen, T0 + 20))
    assert drain.durable == durable


def test_the_state_of_a_round_of_one_is_saved_though_a_spare_is_ready() -> None:
    """No neighbour has a copy of the state."""
    seen = jobs.running(jobs.spec(replicas=1, elastic={"standbyReplicas": 1}), 1)
    spare = jobs.pod(1, node="node-9", ip="127.0.0.9", created=T0)
    seen = replace(seen, pods=(*seen.pods, spare), agents={**seen.agents, spare.name: jobs.agent(spare.name)})
    (drain,) = drains(plan(pods(seen, 0, deleting=True, deletion_at=T0 + 50), T0 + 20))
    assert drain.durable


def test_a_drain_becomes_durable_when_the_rest_must_go_too() -> None:
    seen = RUNNING
    one = pods(seen, 1, deleting=True, deletion_at=T0 + 50)
    (drain,) = drains(plan(one, T0 + 20))
    asked = coordinator(one, drain=jobs.called(one.agents["demo-0-0"], drain, T0 + 20, done_at=T0 + 20).drain)
    assert drains(plan(asked, T0 + 20.1)) == [], "once is enough"
    every = pods(asked, 0, 1, 2, deleting=True, deletion_at=T0 + 50)
    (again,) = drains(plan(every, T0 + 21))
    assert again.durable


@pytest.mark.parametrize("fields", [{"notice": TAINT}, {"cordoned": True}], ids=["leave", "move"])
def test_neighbours_that_go_together_hand_over_what_only_they_hold(fields: dict[str, Any]) -> None:
    """Two of four leave: the shard of the first of them is on the second alone."""
    seen = jobs.running(jobs.spec(replicas=4), 4)
    seen = coordinator(on_node(seen, 1, 2, **fields), report=jobs.coordinator_report(state="drained"))
    if "cordoned" in fields:
        successors = [jobs.pod(index, 1, node="node-9", ip=f"127.0.1.{index}") for index in (1, 2)]
        ready = {pod.name: jobs.agent(pod.name) for pod in successors}
        every = sorted((*seen.pods, *successors), key=lambda pod: pod.name)
        seen = replace(seen, pods=tuple(every), agents={**seen.agents, **ready})
    made = plan(seen, T0 + 20)
    prepares = jobs.sends(made, protocol.Prepare)
    assert {"demo-0-0", "demo-1-0", "demo-2-0", "demo-3-0"} <= prepares.keys()
    id = protocol.SnapshotId(1, 40, "layout", 4)
    order = [member.replica for member in seen.job.status.world.members]
    holds = {name: (protocol.HeldSnapshot(id, tuple(sorted((i, (i - 1) % 4)))),) for i, name in enumerate(order)}

    def answered(*names: str) -> Plan:
        agents = dict(seen.agents)
        for name, message in prepares.items():
            reply = jobs.prepared(name, message, snapshots=holds.get(name, ()))
            done = {"done_at": T0 + 20, "reply": reply} if name in names else {}
            agents[name] = jobs.called(agents[name], message, T0 + 20, **done)
        return plan(jobs.then(seen, made, agents=agents), T0 + 20.1)

    waits = answered(*(prepares.keys() - {"demo-1-0", "demo-2-0"}))
    assert not waits.status.world.claim.committed, "the newest state may be with those who leave"
    commits = answered(*prepares)
    members = [member.replica for member in commits.status.world.members]
    assert len({"demo-1-0", "demo-2-0"}.intersection(members)) == 1, "one of them holds all that is missing"
    assigns = jobs.sends(commits, protocol.Assign)
    assert {message.restore.step for message in assigns.values()} == {40}
    assert assigns.keys() == set(members)
    assert jobs.sends(commits, protocol.Release).keys() == {"demo-1-0", "demo-2-0"} - set(members)
    assert commits.status.steps_replayed == 0


def alone(spare: bool = False, **fields: Any) -> JobObservation:
    """Return a round of one replica."""
    return jobs.running(jobs.spec(replicas=1, elastic={"standbyReplicas": 1} if spare else None, **fields), 1)


def with_ready(seen: JobObservation, pod: Any) -> JobObservation:
    every = tuple(sorted((*seen.pods, pod), key=lambda each: each.order))
    return replace(seen, pods=every, agents={**seen.agents, pod.name: jobs.agent(pod.name)})


NEXT = jobs.pod(0, 1, node="node-9", ip="127.0.0.9", created=T0)


def test_the_state_of_a_round_of_one_is_saved_before_it_moves_too() -> None:
    stored = jobs.spec(replicas=1, elastic=None, checkpoint={"uri": "s3://bucket/x"})
    seen = on_node(alone(), 0, cordoned=True)
    seen = replace(seen, job=replace(seen.job, spec=stored))
    assert drains(plan(seen, T0 + 20)) == []
    (drain,) = drains(plan(with_ready(seen, NEXT), T0 + 20))
    assert (drain.durable, drain.grace_seconds) == (True, 30.0), "storage may be away, and nothing is urgent"


@pytest.mark.parametrize(
    ("seen", "heir"),
    [
        (with_ready(on_node(alone(), 0, cordoned=True), NEXT), "demo-0-1"),
        (with_ready(pods(alone(), 0, deleting=True, deletion_at=T0 + 50), NEXT), "demo-0-1"),
        (
            with_ready(
                pods(alone(spare=True), 0, deleting=True, deletion_at=T0 + 50),
                jobs.pod(1, node="node-9", ip="127.0.0.9"),
            ),
            "demo-1-0",
        ),
    ],
    ids=["moves", "leaves, and its successor is ready", "leaves, and a standby replica is ready"],
)
def test_who_is_alone_hands_over_to_whoever_takes_its_place(seen: JobObservation, heir: str) -> None:
    """A round of the old replica alone would leave its state where it is."""
    made = plan(seen, T0 + 20)
    assert drains(made)
    seen = coordinator(jobs.then(seen, made), report=jobs.coordinator_report(state="drained"))
    made = plan(seen, T0 + 21)
    prepares = jobs.sends(made, protocol.Prepare)
    assert sorted(prepares) == ["demo-0-0", heir]
    assert deleted(made) == []
    held = (protocol.HeldSnapshot(protocol.SnapshotId(1, 40, "layout", 1), (0,)),)

    def answered(*names: str, cut: bool = False) -> JobObservation:
        agents = dict(seen.agents)
        for name, message in prepares.items():
            found = {"snapshots": held} if name == "demo-0-0" else {}
            found |= {"reachable": (name,)} if cut else {}
            done = {"done_at": T0 + 21, "reply": jobs.prepared(name, message, **found)} if name in names else {}
            agents[name] = jobs.called(agents[name], message, T0 + 21, **done)
        return jobs.then(seen, made, agents=agents)

    assert not plan(answered(heir), T0 + 21.1).status.world.claim.committed, "the state is with the other one"
    commits = plan(answered(*prepares), T0 + 21.1)
    assert [member.replica for member in commits.status.world.members] == [heir]
    assert commits.status.steps_replayed == 0
    ((told, assign),) = jobs.sends(commits, protocol.Assign).items()
    assert (told, assign.restore.step, assign.restore.holders) == (heir, 40, {"0": ("demo-0-0",)})
    assert [other.replica for other in assign.outside] == ["demo-0-0"]
    assert jobs.sends(commits, protocol.Release) == {}, "the round has no other source of the state"
    (member,) = plan(answered(*prepares, cut=True), T0 + 30).status.world.members
    assert member.replica == "demo-0-0", "it is not given up for one that can't fetch it"


def test_a_replica_that_handed_over_is_released_once_the_round_has_a_snapshot() -> None:
    """The replica leaves, and is prepared for the round without being a member."""
    leaver = jobs.pod(3, ip="127.0.0.8", deleting=True, deletion_at=T0 + 50)
    base = replace(RUNNING, pods=(*RUNNING.pods, leaver))

    def look(step: int | None = 41, **leaver_fields: Any) -> JobObservation:
        report = jobs.coordinator_report()
        assert report.progress is not None
        progress = replace(report.progress, snapshot_step=step)
        agents = {**base.agents, leaver.name: AgentView(**leaver_fields)}
        return coordinator(replace(base, agents=agents), report=replace(report, progress=progress))

    def released(seen: JobObservation) -> list[str]:
        return list(jobs.sends(plan(seen, T0 + 20), protocol.Release))

    assert released(look(step=None)) == [], "the round could not be repeated without it"
    assert released(look()) == [leaver.name], "also by an operator that was not there when it was prepared"
    sent = jobs.called(jobs.agent(leaver.name), protocol.Release("uid", 1, "claim-a"), T0 + 19).release
    assert released(look(release=sent)) == [], "the message is on its way"
    assert sent is not None
    assert released(look(release=replace(sent, done_at=T0 + 19, error="refused"))) == [leaver.name]
    assert released(look(release=replace(sent, round=0))) == [leaver.name]
    stays = replace(look(), pods=(*RUNNING.pods, replace(leaver, deleting=False, deletion_at=None)))
    assert released(stays) == [], "a standby replica stays prepared"


@pytest.mark.parametrize(
    ("fields", "counted"),
    [
        ({"exit_code": 1}, 1),
        ({"exit_code": 143}, 0),
        ({"exit_code": 1, "disruption": "TerminationByKubelet"}, 0),
        ({"exit_code": 1, "exit_reason": "Terminated"}, 0),
        ({"exit_code": 0, "deleting": True}, 0),
    ],
)
def test_an_exit_after_a_notice_is_no_failure(fields: dict[str, Any], counted: int) -> None:
    made = plan(pods(RUNNING, 1, phase="Failed", **fields), T0 + 20)
    assert made.status.restarts.in_window == counted


def test_a_member_that_left_after_the_drain_does_not_break_the_round() -> None:
    """The other members may still be writing the checkpoint."""
    left = protocol.MemberState("demo-1-0", "i-demo-1-0", 1, "claim-a", "drained", step=41)
    report = jobs.coordinator_report(state="draining", members={"demo-1-0": left})
    seen = coordinator(replace(RUNNING, pods=(RUNNING.pods[0], RUNNING.pods[2])), report=report)
    made = plan(seen, T0 + 20)
    assert not jobs.sends(made, protocol.Prepare)
    assert made.status.restarts.total == 0


def test_a_coordinator_that_leaves_is_listened_to_until_it_has_gone() -> None:
    seen = pods(RUNNING, 0, deleting=True, deletion_at=T0 + 50)
    made = plan(seen, T0 + 20)
    assert len(drains(made)) == 1
    assert "demo-0-0" in made.watch
    drained = coordinator(jobs.then(seen, made), report=jobs.coordinator_report(state="drained"))
    made = plan(drained, T0 + 21)
    assert sorted(jobs.sends(made, protocol.Prepare)) == ["demo-1-0", "demo-2-0"]
