"""Evidence of life: who is alive, silent or dead, on whose word, and since when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import jobs
from builders.jobs import T0
from concertina.plan.facts import constants
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.health import Evidence, Life, Verdict
from concertina.plan.observed import ConnectionRefusal, NodeView, Observed

NOW = T0 + 1000
CUT_OFF = {"connected": False, "lost_at": NOW - constants.RECONNECT}
LONG_AGO = {"connected": False, "lost_at": NOW - constants.WHOLE_WORLD}


def seen(replica: int, pod: dict[str, Any], agent: dict[str, Any], node: dict[str, Any], others: bool) -> Observed:
    """A round of three, of which one replica's pod, agent and node are as given; whether others are heard."""
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
        ({"phase": "Failed"}, {}, {}, True, Life.DEAD, Evidence.POD),
        ({}, {"connected": False, "refusal": ConnectionRefusal.NOT_LISTENING}, {}, True, Life.DEAD, Evidence.HOST),
        ({}, {"connected": False, "refusal": ConnectionRefusal.OTHER_KEY}, {}, True, Life.ALIVE, None),
        ({}, {"connected": False, "lost_at": NOW - 0.1}, {}, True, Life.ALIVE, None),
        ({}, CUT_OFF, {}, True, Life.DEAD, Evidence.SILENCE),
        ({}, CUT_OFF, {}, False, Life.SILENT, Evidence.SILENCE),
        ({}, LONG_AGO, {}, False, Life.DEAD, Evidence.SILENCE),
        ({"deleting": True}, CUT_OFF, {}, False, Life.DEAD, Evidence.POD),
        ({}, CUT_OFF, {"ready": False}, False, Life.DEAD, Evidence.NODE),
    ],
)
def test_the_lead_is_judged(pod: Any, agent: Any, node: Any, others: bool, life: Life, evidence: Evidence) -> None:
    found = context(0, pod, agent, node, others).health.lead
    assert (found.life, found.evidence) == (life, evidence)
    assert bool(found.sentence) is found.dead
    if evidence is Evidence.SILENCE:
        assert found.age == pytest.approx(NOW - agent["lost_at"])


def outside(agent: dict[str, Any], node: dict[str, Any], others: bool) -> Verdict:
    """Of a replica that is no member: the fourth, which has come late."""
    before = seen(0, {}, {}, {}, others)
    if not others:
        before = replace(before, agents={name: replace(view, connected=False) for name, view in before.agents.items()})
    late = jobs.pod(3)
    view = replace(jobs.agent(late.name), **agent)
    nodes = {**before.nodes, "node-3": NodeView("node-3", **{"ready": True, **node})}
    found = replace(before, pods=(*before.pods, late), agents={**before.agents, late.name: view}, nodes=nodes)
    assert found.job.spec
    return JobContext(found, found.job.spec, NOW).health.by_contact(late)


@pytest.mark.parametrize(
    ("agent", "node", "others", "life", "evidence"),
    [
        ({}, {}, True, Life.ALIVE, None),
        ({"connected": False}, {"ready": False}, True, Life.DEAD, Evidence.NODE),
        ({"connected": False, "lost_at": NOW - constants.UNREACHABLE}, {}, True, Life.DEAD, Evidence.SILENCE),
        ({"connected": False, "lost_at": NOW - constants.UNREACHABLE}, {}, False, Life.ALIVE, None),
        ({"connected": False, "wanted_at": NOW - constants.UNREACHABLE}, {}, True, Life.ALIVE, None),
        ({"connected": False, "wanted_at": NOW - constants.AGENT_GIVE_UP}, {}, True, Life.DEAD, Evidence.SILENCE),
    ],
)
def test_a_replica_outside_of_the_round_is_judged(
    agent: Any, node: Any, others: bool, life: Life, evidence: Evidence
) -> None:
    found = outside(agent, node, others)
    assert (found.life, found.evidence) == (life, evidence)


def test_a_member_whose_lead_says_nothing_bad_of_it_lives_however_silent_it_is() -> None:
    ctx = context(1, {}, LONG_AGO, {"ready": False}, True)
    assert ctx.health.by_contact(ctx.replicas.pods["demo-1-0"]).life is Life.ALIVE
