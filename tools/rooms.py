"""Count the source files that two flows of the operator use.

In the first flow, a manifest becomes a Pod. In the second flow, a worker's failure leads to a new round.

Usage: `PYTHONPATH=tests:operator:trainer_image .venv/bin/python tools/rooms.py [-v]`. With `-v` the files are listed.

Only pure functions run: parsing, `plan()`, manifests, and the agent's core. Their input is the observations of the unit
tests. Client, cache, queue and streams are not counted. A file is counted if one of its functions is called. Importing
a file does not count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import concertina_protocol as protocol
from builders import jobs
from builders.agent import Driver
from concertina.kube.manifests.agent_container import PodSettings
from concertina.kube.manifests.pod import pod_manifest
from concertina.kube.parse.views import job_view
from concertina.plan.actions import CreatePod, Plan
from concertina.plan.observed import AgentView
from concertina.plan.plan import plan

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (f"{ROOT}/operator/", f"{ROOT}/trainer_image/")
MANIFEST = {
    "metadata": {
        "name": "demo",
        "namespace": "default",
        "uid": jobs.UID,
        "generation": 1,
        "creationTimestamp": "2027-01-15T08:00:00Z",
    },
    "spec": {
        "replicas": 3,
        "elastic": {"minReplicas": 2},
        "template": {"spec": {"containers": [{"name": "trainer", "image": "concertina/trainer"}]}},
        "trainer": {"steps": 100, "data": {"uri": "/data"}},
    },
}
SIGKILLED = -9

Files = set[str]


@contextmanager
def entered(files: Files) -> Iterator[None]:
    """Add to `files` the file of each function that is called while the block runs."""

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(SOURCES):
            files.add(code.co_filename)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def manifest_to_pod() -> dict[str, Files]:
    parse, decide, write = Files(), Files(), Files()
    with entered(parse):
        job = job_view(MANIFEST)
    observed = jobs.observed(job)
    with entered(decide):
        made = plan(observed, jobs.T0)
    create = next(action for action in made.actions if isinstance(action, CreatePod))
    assert job.spec is not None
    with entered(write):
        pod_manifest(job, job.spec, create, PodSettings("registry/agent:1"))
    return {"parse": parse, "plan()": decide, "Pod": write}


def failure_to_round() -> dict[str, Files]:
    at_member, at_coordinator, to_claim, to_commit = Files(), Files(), Files(), Files()
    names, now = ("demo-0-0", "demo-1-0", "demo-2-0"), jobs.T0 + 20
    member, coordinator = Driver("b"), Driver("a")
    member.begun("a", "b", "c")
    coordinator.begun("a", "b", "c")
    with entered(at_member):
        member.ended(SIGKILLED, rank=1)
        failure = member.core.member_state().failure
    assert failure is not None, "the member has not noticed"
    with entered(at_coordinator):
        coordinator.member_says("b", "failed", failure=failure)
    failure = replace(coordinator.report.failures[0], replica=names[1])
    observed = jobs.running(jobs.spec())
    agents = dict(observed.agents)
    agents[names[0]] = replace(agents[names[0]], report=jobs.coordinator_report(state="failed", failures=(failure,)))
    observed = replace(observed, agents=agents)
    with entered(to_claim):
        claimed = plan(observed, now)
    answered = {name: _answer(agents[name], name, message, now) for name, message in _prepares(claimed).items()}
    assert answered, "no round is claimed"
    observed = jobs.then(observed, claimed, agents=agents | answered)
    with entered(to_commit):
        committed = plan(observed, now)
    assert jobs.sends(committed, protocol.Assign), "the claim is not committed"
    return {
        "member": at_member,
        "coordinator": at_coordinator,
        "plan() to the claim": to_claim,
        "plan() to the commit": to_commit,
    }


def _prepares(made: Plan) -> dict[str, protocol.Prepare]:
    return jobs.sends(made, protocol.Prepare)


def _answer(view: AgentView, name: str, message: protocol.Prepare, now: float) -> AgentView:
    snapshot = protocol.HeldSnapshot(protocol.SnapshotId(1, 40, "layout", 3), (int(name[5]),))
    reply: Any = jobs.prepared(name, message, snapshots=(snapshot,))
    return jobs.called(view, message, now, done_at=now, reply=reply)


FLOWS: dict[str, Callable[[], dict[str, Files]]] = {
    "manifest to Pod": manifest_to_pod,
    "failure to new round": failure_to_round,
}


def main() -> None:
    for flow, walk in FLOWS.items():
        parts = walk()
        everything = sorted(set.union(*parts.values()))
        detail = ", ".join(f"{part} {len(files)}" for part, files in parts.items())
        print(f"{flow}: {len(everything)} files ({detail})")
        if "-v" in sys.argv[1:]:
            print("".join(f"  {Path(file).relative_to(ROOT)}\n" for file in everything), end="")


if __name__ == "__main__":
    main()
