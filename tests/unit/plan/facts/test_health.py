"""Evidence of life: which replicas are alive, silent or dead, by which evidence, and since when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import concertina_protocol as protocol
from builders import jobs
from builders.jobs import T0
from concertina.api.status import JobStatus, rfc3339
from concertina.api.world import World
from concertina.plan.actions import DeletePod
from concertina.plan.facts import constants
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.health import EvidenceSource, HealthVerdict, Life
from concertina.plan.observed import ConnectionRefusal, JobObservation, NodeView
from concertina.plan.plan import plan

NOW = T0 + 1000
CUT_OFF = {"connected": False, "lost_at": NOW - constants.RECONNECT}
LONG_AGO = {"connected": False, "lost_at": NOW - 10_000}
NEVER_LISTENED = {"connected": False, "refusal": ConnectionRefusal.NOT_LISTENING}
GONE = {**CUT_OFF, "closed": True, "refusal": ConnectionRefusal.NOT_LISTENING}


def seen(
    replica: int, pod: dict[str, Any], agent: dict[str, Any], node: dict[str, Any], others: bool
) -> JobObservation:
    """Return the observation of a round of three replicas, with these fields of one replica's pod, agent and node.

    The agents of the other replicas are connected or not.
    """
    before, name = jobs.running(jobs.spec()), f"demo-{replica}-0"
    agents = {each: view if others else replace(view, connected=False) for each, view in before.agents.items()}
    agents[name] = replace(before.agents[name], **agent)
    nodes = {**before.nodes, f"node-{replica}": NodeView(f"node-{replica}", **{"ready": True, **node})}
    pods = tuple(replace(each, **pod) if each.name == name else each for each in before.pods)
    return replace(before, pods=pods, agents=agents, nodes=nodes)


def context(*args: Any) -> JobContext:
    found = seen(*args)
    assert found.job.spec
    return JobContext(found, found.job.spec, NOW)


@pytest.mark.parametrize(
    ("pod", "agent", "node", "others", "life", "evidence"),
    [
        ({}, {}, {}, True, Life.ALIVE, None),
        ({"phase": "Failed"}, {}, {}, True, Life.DEAD, EvidenceSource.POD),
        ({}, GONE, {}, True, Life.DEAD, EvidenceSource.HOST),
        ({}, {**GONE, "closed": False}, {}, True, Life.SILENT, EvidenceSource.SILENCE),
        ({}, {"connected": False, "refusal": ConnectionRefusal.OTHER_KEY}, {}, True, Life.ALIVE, None),
        ({}, {"connected": False, "lost_at": NOW - 0.1}, {}, True, Life.ALIVE, None),
        ({}, CUT_OFF, {}, True, Life.SILENT, EvidenceSource.SILENCE),
        ({}, CUT_OFF, {}, False, Life.SILENT, EvidenceSource.SILENCE),
        ({}, LONG_AGO, {}, False, Life.SILENT, EvidenceSource.SILENCE),
        ({"deleting": True}, CUT_OFF, {}, False, Life.DEAD, EvidenceSource.POD),
        ({}, CUT_OFF, {"ready": False}, False, Life.DEAD, EvidenceSource.NODE),
    ],
)
def test_the_coordinator_is_judged(
    pod: Any, agent: Any, node: Any, others: bool, life: Life, evidence: EvidenceSource
) -> None:
    found = context(0, pod, agent, node, others).health.coordinator
    assert (found.life, found.evidence) == (life, evidence)
    assert bool(found.sentence) is found.dead
    if evidence is EvidenceSource.SILENCE:
        assert found.age == pytest.approx(NOW - agent["lost_at"])


def test_a_stream_that_is_closed_and_refused_is_a_doubt_where_most_of_all_jobs_are_lost_alike() -> None:
    found = replace(seen(0, {}, GONE, {}, True), operator_isolated=True)
    assert found.job.spec
    coordinator = JobContext(found, found.job.spec, NOW).health.coordinator
    assert (coordinator.life, coordinator.evidence) == (Life.SILENT, EvidenceSource.SILENCE)


OF_ROUND: dict[str, Any] = {"round": 1, "claim": "claim-a", "state": "running"}
LOST = protocol.Failure(
    "demo-1-0", "CoordinatorLost", "The coordinator demo-0-0 has been silent or out of reach for too long."
)


@pytest.mark.parametrize(
    ("report", "node", "life", "evidence", "words"),
    [
        (OF_ROUND, {}, Life.SILENT, EvidenceSource.MEMBERS, ""),
        (OF_ROUND, {"ready": False}, Life.SILENT, EvidenceSource.MEMBERS, ""),
        (
            {**OF_ROUND, "state": "failed", "failures": (LOST,)},
            {},
            Life.DEAD,
            EvidenceSource.MEMBERS,
            "silent or out of",
        ),
        ({**OF_ROUND, "state": "drained"}, {}, Life.DEAD, EvidenceSource.DRAIN, "demo-1-0 says: its part is over"),
        ({**OF_ROUND, "instance": "another"}, {}, Life.DEAD, EvidenceSource.MEMBERS, "demo-1-0 was restarted"),
        ({**OF_ROUND, "state": "failed", "round": 0}, {}, Life.SILENT, EvidenceSource.SILENCE, ""),
        ({**OF_ROUND, "state": "succeeded"}, {}, Life.SILENT, EvidenceSource.SILENCE, ""),
        ({**OF_ROUND, "state": "prepared"}, {"ready": False}, Life.DEAD, EvidenceSource.NODE, ""),
    ],
)
def test_of_a_coordinator_that_is_not_heard_its_members_are_asked(
    report: dict[str, Any], node: dict[str, Any], life: Life, evidence: EvidenceSource, words: str
) -> None:
    found = seen(0, {}, CUT_OFF, node, True)
    told = jobs.agent("demo-1-0", report=jobs.report("demo-1-0", **report))
    found = replace(found, agents={**found.agents, "demo-1-0": told})
    assert found.job.spec
    coordinator = JobContext(found, found.job.spec, NOW).health.coordinator
    assert (coordinator.life, coordinator.evidence) == (life, evidence)
    assert words in coordinator.sentence
    silent = replace(found, agents={**found.agents, "demo-1-0": replace(told, connected=False)})
    assert found.job.spec
    alone = JobContext(silent, found.job.spec, NOW).health.coordinator
    assert alone.evidence is (EvidenceSource.NODE if node else EvidenceSource.SILENCE), "who is not heard says nothing"


def outside(agent: dict[str, Any], node: dict[str, Any], others: bool, **besides: Any) -> HealthVerdict:
    """Return the verdict on a replica that is no member, the fourth, which has come late.

    `besides` are further fields of the observation.
    """
    before = seen(0, {}, {}, {}, others)
    if not others:
        before = replace(before, agents={name: replace(view, connected=False) for name, view in before.agents.items()})
    late = jobs.pod(3)
    view = replace(jobs.agent(late.name), **agent)
    nodes = {**before.nodes, "node-3": NodeView("node-3", **{"ready": True, **node})}
    found = replace(before, pods=(*before.pods, late), agents={**before.agents, late.name: view}, nodes=nodes)
    found = replace(found, **{"given_up": frozenset({late.uid}), **besides})
    assert found.job.spec
    return JobContext(found, found.job.spec, NOW).health.by_contact(late)


@pytest.mark.parametrize(
    ("agent", "node", "others", "life", "evidence"),
    [
        ({}, {}, True, Life.ALIVE, None),
        ({"connected": False}, {"ready": False}, True, Life.DEAD, EvidenceSource.NODE),
        ({"connected": False, "lost_at": NOW - constants.UNREACHABLE}, {}, True, Life.DEAD, EvidenceSource.SILENCE),
        ({"connected": False, "lost_at": NOW - constants.UNREACHABLE}, {}, False, Life.SILENT, EvidenceSource.SILENCE),
        (
            {"connected": False, "lost_at": NOW - 10_000, "queued_at": NOW - 10_000 + 1.0},
            {},
            True,
            Life.ALIVE,
            None,
        ),
        ({"connected": False, "wanted_at": NOW - constants.UNREACHABLE}, {}, True, Life.ALIVE, None),
        ({"connected": False, "wanted_at": NOW - constants.AGENT_GIVE_UP}, {}, True, Life.DEAD, EvidenceSource.SILENCE),
        ({"connected": False, "wanted_at": NOW - 10_000}, {}, False, Life.SILENT, EvidenceSource.SILENCE),
        ({**NEVER_LISTENED, "wanted_at": NOW - constants.AGENT_GIVE_UP}, {}, False, Life.DEAD, EvidenceSource.HOST),
        ({**NEVER_LISTENED, "wanted_at": NOW - constants.AGENT_START}, {}, False, Life.ALIVE, None),
    ],
)
def test_a_replica_outside_of_the_round_is_judged(
    agent: Any, node: Any, others: bool, life: Life, evidence: EvidenceSource
) -> None:
    found = outside(agent, node, others)
    assert (found.life, found.evidence) == (life, evidence)


def test_a_coordinator_that_drained_its_world_was_alive_until_then_however_long_the_operator_did_not_hear_it() -> None:
    """The coordinator's pod holds a part of the state."""
    found = seen(0, {}, LONG_AGO, {}, True)
    drained = jobs.report("demo-1-0", **{**OF_ROUND, "state": "drained"})
    found = replace(found, agents={**found.agents, "demo-1-0": jobs.agent("demo-1-0", report=drained)})
    assert found.job.spec
    pod = next(pod for pod in found.pods if pod.name == "demo-0-0")
    assert JobContext(found, found.job.spec, NOW).health.coordinator.dead, "another round is made"
    assert JobContext(found, found.job.spec, NOW).health.by_contact(pod).life is Life.ALIVE

    world = found.job.status.world
    assert world.claim
    for reason, seconds, life in [
        ("Drained", constants.UNREACHABLE - 0.1, Life.ALIVE),
        ("Drained", constants.UNREACHABLE, Life.DEAD),
        ("Drained", -3600.0, Life.DEAD),
        ("CoordinatorLost", 0.0, Life.DEAD),
    ]:
        made = {"round": 2, "claim_id": "b", "committed": False, "at": rfc3339(NOW - seconds), "reason": reason}
        claimed = world.model_copy(update={"claim": world.claim.model_copy(update=made)})
        status = found.job.status.model_copy(update={"world": claimed})
        later = replace(found, job=replace(found.job, status=status), given_up=frozenset({pod.uid}))
        assert JobContext(later, found.job.spec, NOW).health.by_contact(pod).life is life, (reason, seconds)


def test_a_member_whose_coordinator_says_nothing_bad_of_it_lives_however_silent_it_is() -> None:
    ctx = context(1, {}, LONG_AGO, {"ready": False}, True)
    assert ctx.health.by_contact(ctx.replicas.pods["demo-1-0"]).life is Life.ALIVE


def test_who_waits_for_the_first_round_is_waited_for_longer() -> None:
    """Before the first round, lost streams are noticed later, so other replicas would seem reachable."""
    pods = tuple(jobs.pod(index) for index in range(3))
    lost_at = NOW - constants.UNREACHABLE
    agents = {pod.name: jobs.agent(pod.name) for pod in pods}
    agents["demo-0-0"] = replace(agents["demo-0-0"], connected=False, lost_at=lost_at)

    def verdict(status: JobStatus, at: float) -> Life:
        found = replace(jobs.observed(jobs.job(jobs.spec(), status), pods), agents=agents)
        found = replace(found, given_up=frozenset({pods[0].uid}))
        assert found.job.spec
        return JobContext(found, found.job.spec, at).health.by_contact(pods[0]).life

    assert verdict(JobStatus(world=World(round=1)), NOW) is Life.DEAD
    assert verdict(JobStatus(), NOW) is Life.ALIVE
    assert verdict(JobStatus(), lost_at + constants.UNREACHABLE_BEFORE) is Life.DEAD


def test_silence_alone_is_death_only_once_the_shell_has_given_the_pod_up() -> None:
    silent = {"connected": False, "lost_at": NOW - constants.UNREACHABLE}
    waits = outside(silent, {}, True, given_up=frozenset({"another's"}))
    assert (waits.life, waits.evidence, waits.waits) == (Life.SILENT, EvidenceSource.SILENCE, True)
    assert outside(silent, {}, True).dead
    disrupted = outside(silent, {}, True, operator_isolated=True)
    assert (disrupted.life, disrupted.waits) == (Life.SILENT, False), "it does not even ask"
    assert outside({**silent, "refusal": ConnectionRefusal.NOT_LISTENING}, {}, True, given_up=frozenset()).dead
    assert outside(silent, {"ready": False}, True, given_up=frozenset()).dead


def test_pods_that_are_silent_are_named_for_the_limit_the_longest_first() -> None:
    before = jobs.observed(jobs.job(jobs.spec(replicas=5)), tuple(jobs.pod(index) for index in range(5)))
    lost_at = {"demo-1-0": NOW - 60.0, "demo-2-0": NOW - 90.0, "demo-3-0": NOW - 70.0, "demo-4-0": NOW - 1.0}
    agents = {pod.name: jobs.agent(pod.name) for pod in before.pods}
    agents |= {name: replace(agents[name], connected=False, lost_at=at) for name, at in lost_at.items()}
    pods = (*before.pods[:3], replace(before.pods[3], deleting=True), before.pods[4])
    found = replace(before, pods=pods, agents=agents)
    made = plan(found, NOW)
    assert made.silent == ("pod-2-0", "pod-1-0")
    assert not [action for action in made.actions if isinstance(action, DeletePod)]
    made = plan(replace(found, given_up=frozenset({"pod-2-0"})), NOW)
    assert made.silent == ("pod-2-0", "pod-1-0"), "as long as it is silent"
    assert [action.name for action in made.actions if isinstance(action, DeletePod)] == ["demo-2-0"]


def test_what_kept_silent_before_its_container_was_started_again_says_nothing_of_it() -> None:
    refused = {"connected": False, "lost_at": NOW - 60.0, "refusal": ConnectionRefusal.NOT_LISTENING}
    pod = jobs.pod(3)
    assert outside(refused, {}, True).dead
    assert not outside(refused, {}, True, started_again_for={pod.uid: 3.0}).dead
    assert outside(refused, {}, True, started_again_for={"another's": 3.0}).dead
    long_ago = {**refused, "lost_at": NOW - 3600.0}
    assert outside(long_ago, {}, True, started_again_for={pod.uid: constants.AGENT_GIVE_UP}).dead
