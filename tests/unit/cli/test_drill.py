"""What a drill makes of what it saw."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest

from builders.cluster import drills
from concertina.api.status import JobStatus
from concertina.drill.faults import by_command, by_object
from concertina.drill.faults.by_command import ByCommand
from concertina.drill.scenarios import SCENARIOS
from concertina.drill.target import DrillTarget, Injection
from concertina.drill.verdict import Expect, Seconds, Seen, evaluate, positions
from concertina.kube.resources import LEASES, Raw, Resource
from concertina.terminal.connection import Complaint
from concertina_protocol import RestoreSource
from concertina_protocol.log_lines import RoundStarted

START = RoundStarted(4, 13, RestoreSource.MEMORY, 12, {}, at=100.0)
SEEN = Seen(
    Seconds(first_step=1.0), before=3, after=2, end=3, rounds=1, rounds_in_all=2, cause="MemberLost", start=START
)
CRASH = Expect(seconds=5.0, replayed=1, counted=False, reasons=("MemberLost", "NodeLost"))
CALM = replace(SEEN, rounds=0, rounds_in_all=0, start=None, cause="")


def test_what_is_promised_passes() -> None:
    verdict = evaluate("kill-node", "a/b", "killed node n1", CRASH, SEEN)
    assert verdict.passed
    assert verdict.reasons == ()
    assert verdict.positions == "exact: round 4 went on with step 13, its state is the memory of step 12"


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (replace(SEEN, seconds=Seconds(first_step=5.1)), "seen after 5.10 s, promised are 5 s"),
        (replace(SEEN, seconds=Seconds()), "the first step was not seen"),
        (replace(SEEN, rounds=0), "no new round"),
        (replace(SEEN, replayed=2), "2 steps were trained again"),
        (replace(SEEN, counted=1), "counted against maxRestarts"),
        (replace(SEEN, cause="WorkerFailed: x"), "the operator says: WorkerFailed: x"),
        (replace(SEEN, end=2), "with 2 of 3 replicas"),
        (replace(SEEN, start=replace(START, step=14)), "NOT exact"),
        (replace(SEEN, missing="a step did not come"), "a step did not come"),
    ],
)
def test_each_broken_promise_is_named(seen: Seen, words: str) -> None:
    verdict = evaluate("kill-node", "a/b", "killed node n1", CRASH, seen)
    assert not verdict.passed
    assert len(verdict.reasons) == 1
    assert words in verdict.reasons[0]


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (
            replace(CALM, rounds_in_all=1, cause="MemberLost"),
            "1 new rounds were started, and none was needed: MemberLost",
        ),
        (replace(CALM, same_pods=False), "pods of the job were replaced"),
    ],
)
def test_a_job_that_must_not_notice(seen: Seen, words: str) -> None:
    expect = Expect(seconds=5.0, new_round=False)
    assert evaluate("operator-kill", "a/b", "", expect, CALM).passed
    assert words in evaluate("operator-kill", "a/b", "", expect, seen).reasons[0]


def test_positions_from_the_seed_and_without_a_log() -> None:
    assert positions(replace(SEEN, start=RoundStarted(2, 1, RestoreSource.FRESH, 0, {}, 1.0))).startswith("exact")
    assert positions(replace(SEEN, start=None)).startswith("can't be told")
    assert positions(CALM).startswith("not touched")


def test_every_scenario_can_be_played_or_says_why() -> None:
    for name, scenario in SCENARIOS.items():
        for way in (scenario.local, scenario.elsewhere):
            assert callable(way) or len(way.split()) > 5, name


@dataclass(frozen=True)
class Target(DrillTarget):
    """Of a job as drills play on, in a world of that many replicas, on nodes n0, n1, ...; the operator is on `home`."""

    replicas: int
    home: str = "home"

    async def job(self) -> dict[str, Any]:
        pod = {"spec": {"containers": [{"name": "trainer", "image": "i"}]}}
        return drills.manifest(pod, "s3://bucket/data", {"uri": "s3://bucket/job"})

    async def status(self) -> JobStatus:
        names = {n: {"replica": f"a-{n}-0", "uid": f"u{n}", "node": f"n{n}"} for n in range(self.replicas)}
        members = [{**names[n], "instance": "i", "workers": 1} for n in names]
        return JobStatus.model_validate({"world": {"members": members, "lead": "a-0-0"}})

    async def operator(self) -> dict[str, Any]:
        return {"metadata": {"name": "operator-1"}, "spec": {"nodeName": self.home}}


def target(replicas: int = 3) -> Target:
    return Target(None, "default", drills.JOB, None, replicas)  # type: ignore[arg-type]


class Cluster:
    """A client of a cluster with two releases in one namespace: b's operator serves all, a's two others."""

    async def list_all(self, resource: Resource, *_: Any) -> tuple[list[Raw], str]:
        if resource == LEASES:
            holders = {"a-operator": "a-2", "b-operator": "b-1"}
            return [{"metadata": {"name": n}, "spec": {"holderIdentity": holders[n]}} for n in holders], "1"
        served = {"a-1": "c,d", "a-2": "c,d", "b-2": "", "b-1": ""}
        env = {name: [{"name": "CONCERTINA_WATCH_NAMESPACES", "value": served[name]}] for name in served}
        named = ({"name": name, "namespace": "system"} for name in served)
        return [{"metadata": each, "spec": {"containers": [{"env": env[each["name"]]}]}} for each in named], "1"


@pytest.mark.parametrize(("namespace", "acting"), [("default", "b-1"), ("d", "a-2")])
def test_the_operator_that_is_hurt_is_the_one_that_acts_on_the_job(namespace: str, acting: str) -> None:
    on = DrillTarget(Cluster(), namespace, drills.JOB, None)  # type: ignore[arg-type]
    assert asyncio.run(on.operator())["metadata"]["name"] == acting


async def played(fault: ByCommand, on: DrillTarget) -> Injection:
    async with fault(on) as injection:
        return injection


def test_a_job_that_would_stand_still_without_its_pod_is_refused_none() -> None:
    async def play() -> None:
        async with by_object.refuse_pods(target(replicas=2)):
            raise AssertionError

    with pytest.raises(Complaint, match="minReplicas"):
        asyncio.run(play())


def test_commands_are_told_which_node_and_which_operator(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    said = tmp_path / "said"
    for name, words in (("A", "stop {operator} {operator_node}"), ("B", "go {operator}"), ("C", "{node}"), ("D", "up")):
        monkeypatch.setenv(by_command.PREFIX + name, f"sh -c 'echo {words} >> {said}'")
    operator = ByCommand("A", "B", "stopped {operator}")
    assert asyncio.run(played(operator, target())).text == "stopped operator-1"
    assert asyncio.run(played(ByCommand("C", "D", "killed {node}"), target())).text == "killed n2"
    assert said.read_text().splitlines() == ["stop operator-1 home", "go operator-1", "n2", "up"]
    monkeypatch.delenv(by_command.PREFIX + "A")
    assert operator.given
    with pytest.raises(Complaint, match=by_command.PREFIX + "A"):
        asyncio.run(played(operator, target()))
