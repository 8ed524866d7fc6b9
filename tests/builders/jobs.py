"""Concise constructors of observations of a job, for tests of plan()."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import concertina_protocol as protocol
from concertina.api.parse import parse_spec
from concertina.api.status import JobStatus
from concertina.plan.actions import Plan, Send
from concertina.plan.observed import AgentView, Call, JobObservation, JobView, NodeView, PodPhase, PodView

UID = "uid-1"
T0 = 1_800_000_000.0


def spec(**fields: Any) -> Any:
    """Return a bundled job of 3 replicas, at least 2, without durable checkpoints."""
    manifest: dict[str, Any] = {
        "replicas": 3,
        "elastic": {"minReplicas": 2, "scaleUp": {"stabilizationWindowSeconds": 5}},
        "template": {"spec": {"containers": [{"name": "trainer", "image": "concertina/trainer"}]}},
        "trainer": {"steps": 100, "data": {"uri": "/data"}},
    }
    manifest.update(fields)
    return parse_spec({"spec": {name: value for name, value in manifest.items() if value is not None}})


def command_spec(**fields: Any) -> Any:
    container = {"name": "trainer", "image": "python", "command": ["python3", "train.py"]}
    return spec(trainer=None, template={"spec": {"containers": [container]}}, **fields)


def job(job_spec: Any, status: JobStatus | None = None) -> JobView:
    return JobView(
        name="demo",
        namespace="default",
        uid=UID,
        generation=1,
        created=T0,
        deleting=False,
        spec=job_spec,
        spec_error="",
        status=status or JobStatus(),
    )


def pod(index: int | None, attempt: int = 0, **fields: Any) -> PodView:
    values: dict[str, Any] = {
        "name": f"demo-{index}-{attempt}",
        "uid": f"pod-{index}-{attempt}",
        "index": index,
        "attempt": attempt,
        "created": T0,
        "deleting": False,
        "node": f"node-{index}",
        "ip": f"127.0.0.{(index or 0) + 1}",
        **fields,
        "phase": PodPhase(fields.get("phase", "Running")),
    }
    return PodView(**values)


def report(name: str, **fields: Any) -> protocol.Report:
    values: dict[str, Any] = {
        "replica": name,
        "instance": f"i-{name}",
        "ready": True,
        "round": 0,
        "claim": "",
        "state": "idle",
    }
    return protocol.Report(**{**values, **fields})


def agent(name: str, **fields: Any) -> AgentView:
    """Return the view of an agent that has been connected and ready since T0."""
    values: dict[str, Any] = {"connected": True, "wanted_at": T0, "ready_at": T0, "report": report(name)}
    return AgentView(**{**values, **fields})


def prepared(name: str, message: protocol.Prepare, **fields: Any) -> protocol.Prepared:
    values: dict[str, Any] = {
        "replica": name,
        "instance": f"i-{name}",
        "round": message.round,
        "claim": message.claim,
        "workers": 1,
        "store": f"store-of-{name}",
        "reachable": tuple(candidate.replica for candidate in message.candidates),
    }
    return protocol.Prepared(**{**values, **fields})


def observed(
    job_view: JobView, pods: tuple[PodView, ...] = (), agents: dict[str, AgentView] | None = None, **fields: Any
) -> JobObservation:
    nodes = {pod.node: NodeView(pod.node, ready=True) for pod in pods}
    return JobObservation(
        job=job_view, pods=pods, nodes=nodes, agents=agents or {}, **{"fresh_claim": "claim-a", **fields}
    )


def then(before: JobObservation, made: Plan, **fields: Any) -> JobObservation:
    """Return the observation after a plan's status was written."""
    return replace(before, job=replace(before.job, status=made.status), **fields)


def sends(made: Plan, kind: type[Any]) -> dict[str, Any]:
    """Return the messages of that kind by replica."""
    return {
        action.replica: action.message
        for action in made.actions
        if isinstance(action, Send) and isinstance(action.message, kind)
    }


def called(view: AgentView, message: Any, at: float, **fields: Any) -> AgentView:
    """Return the agent's view after that message was sent to it."""
    call = replace(Call.of(message, at), **fields)
    return replace(view, **{type(message).__name__.lower(): call})


def running(job_spec: Any, count: int = 3, now: float = T0 + 10, **fields: Any) -> JobObservation:
    """Return a job that trains with all replicas: round 1, coordinator demo-0-0, step 40."""
    from concertina.plan.plan import plan

    pods = tuple(pod(index) for index in range(count))
    agents = {view.name: agent(view.name) for view in pods}
    seen = observed(job(job_spec), pods, agents)
    made = plan(seen, now)
    prepares = sends(made, protocol.Prepare)
    agents = {
        name: called(agents[name], message, now, done_at=now, reply=prepared(name, message))
        for name, message in prepares.items()
    }
    seen = then(seen, made, agents=agents)
    made = plan(seen, now)
    assigns = sends(made, protocol.Assign)
    agents = {
        name: called(agents[name], message, now, done_at=now, reply=protocol.Accepted(message.round, message.claim))
        for name, message in assigns.items()
    }
    coordinator = "demo-0-0"
    agents[coordinator] = replace(agents[coordinator], report=coordinator_report(**fields))
    seen = then(seen, made, agents=agents, fresh_claim="claim-b")
    return then(seen, plan(seen, now))


def coordinator_report(**fields: Any) -> protocol.Report:
    progress = protocol.Progress(40, 100, 2.5, 1000.0, 0.1, 1280, "training", T0 + 10, T0 + 6)
    values: dict[str, Any] = {
        "round": 1,
        "claim": "claim-a",
        "state": "running",
        "coordinator": True,
        "progress": progress,
    }
    return report("demo-0-0", **{**values, **fields})
