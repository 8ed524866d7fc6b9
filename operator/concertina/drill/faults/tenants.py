"""Faults during which the jobs of other tenants put load on the operator. The fault itself kills a worker.

The drill creates namespaces for these jobs, and deletes the namespaces at the end.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from concertina.api import API_VERSION, KIND, TRAINER
from concertina.api.status import rfc3339
from concertina.drill.faults import api_server
from concertina.drill.faults.by_command import PREFIX
from concertina.drill.target import SKEW, DrillTarget, Injection, watched_namespaces
from concertina.kube.manifests.agent_container import VOLUME, VOLUME_PATH
from concertina.kube.manifests.containers import PYTHON, python, trainer_of
from concertina.kube.resources import NAMESPACES, TRAINING_JOBS, Raw
from concertina.terminal.cluster_connection import UserError

DRILL_OF = "concertina.dev/drill-of"
"""Label on the namespaces that a drill creates. Its value is the uid of the job under test."""
OWN_NAME = "kubernetes.io/metadata.name"
"""Label that the API server sets on each namespace."""
QUEUE_JOBS = PREFIX + "QUEUE_JOBS"
"""Environment variable for the number of jobs that wait in the queue."""
DEFAULT_QUEUE_JOBS, MOST_QUEUE_JOBS = 200, 1000
QUEUE_NAMESPACES = 4
NO_NODE_HAS = {"cpu": "1M"}
"""Resource requests that no node can satisfy."""
HELD_BACK = "agents_held_back"
"""Event in the operator's log that says that the operator limits an agent that sends too much.

The log line contains the agent's namespace.
"""
AT_ONCE = 8
"""Maximum number of concurrent requests to the API server."""
WAITING_SECONDS, HELD_BACK_SECONDS, GONE_SECONDS = 180.0, 120.0, 180.0
"""Time limits in seconds: for the report on the waiting jobs, for the operator's limit on an agent, and for deletions.
"""
LOOK_SECONDS = 2.0
OF_POD = ("securityContext", "nodeSelector", "tolerations", "runtimeClassName")
OF_CONTAINER = ("image", "imagePullPolicy", "securityContext")
"""Container fields that are copied from the job under test, because the cluster accepts these values."""

# Replaces the agent's program in the volume from which the agent is started.
_REPLACE_AGENT = """
import os, sys
path = sys.argv[1] + "/agent.pyz"
with open(path + ".new", "w") as file:
    file.write(sys.argv[2])
os.replace(path + ".new", path)
"""

# Agent that has a valid key for its own job. It sends one valid report. After that, it sends the most expensive lines
# that an operator accepts, as fast as the operator reads them: lines with the maximum number of values, and text.
# Consecutive lines differ, so the operator has to process each of them.
_FLOOD = r"""
import asyncio, json, os, signal, ssl, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
volume = os.path.dirname(os.path.abspath(sys.argv[0]))
identity = os.environ.get("CONCERTINA_IDENTITY") or "/etc/concertina"
sys.path.insert(0, volume + "/python")
import concertina_protocol as protocol
report = protocol.Report(os.environ["CONCERTINA_REPLICA"], "flood", False, 0, "", protocol.State.IDLE)
honest = protocol.encode(report)
lines = []
for news in ("one", "another"):
    message = json.loads(honest)
    member = {"replica": "m", "instance": "m", "round": 0, "claim": "", "state": "idle", "saved": list(range(10_000))}
    message["body"].update(members={"m": member}, tracking=news, text="" * 60_000)
    lines.append(json.dumps(message, separators=(",", ":")).encode() + b"\n")
async def flood(reader, writer):
    try:
        await reader.readline()
        writer.write(honest)
        while True:
            for line in lines:
                writer.write(line)
                await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
async def serve():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(identity + "/ca.crt")
    context.load_cert_chain(identity + "/tls.crt", identity + "/tls.key")
    address = os.environ["CONCERTINA_POD_IP"], int(os.environ["CONCERTINA_PORT"])
    server = await asyncio.start_server(flood, *address, ssl=context)
    await server.serve_forever()
asyncio.run(serve())
"""


@asynccontextmanager
async def hostile_agent(target: DrillTarget) -> AsyncIterator[Injection]:
    """Kill a worker while an agent in another namespace floods the operator with messages.

    The worker is killed after the operator's log reports that the operator limits that agent.
    """
    job = await target.job()
    (namespace,) = names = _namespaces(job, 1)
    async with _tenants(target, job, names):
        begun_at = time.time()
        await target.client.create(TRAINING_JOBS, namespace, hostile_job(job, namespace))
        await _until_held_back(target, namespace, begun_at)
        async with api_server.kill_worker(target) as injection:
            words = f"{injection.text}, while an agent of {namespace} sends as much as it can"
            yield replace(injection, text=words)


@asynccontextmanager
async def long_queue(target: DrillTarget) -> AsyncIterator[Injection]:
    """Kill a worker while many jobs in other namespaces wait for resources."""
    job, count = await target.job(), _queue_jobs(os.environ)
    names = _namespaces(job, QUEUE_NAMESPACES)
    async with _tenants(target, job, names):
        turns = asyncio.Semaphore(AT_ONCE)

        async def create(number: int) -> None:
            namespace = names[number % len(names)]
            async with turns:
                await target.client.create(TRAINING_JOBS, namespace, waiting_job(job, namespace, f"waits-{number}"))

        async with asyncio.TaskGroup() as creating:
            for number in range(count):
                creating.create_task(create(number))
        await _until_waiting(target, names, count)
        async with api_server.kill_worker(target) as injection:
            yield replace(injection, text=f"{injection.text}, while {count} jobs of other namespaces wait for room")


def hostile_job(like: Raw, namespace: str, agents: int = 1) -> Raw:
    """Return a TrainingJob whose agents flood the operator.

    Args:
        like: Job whose image, Python and security settings the new job copies.
        namespace: Namespace of the new job.
        agents: Number of replicas.
    """
    trainer = trainer_of(like["spec"]["template"])
    flood = {
        "name": "flood",
        **_present_fields(trainer, OF_CONTAINER),
        "command": [python(trainer), "-c", _REPLACE_AGENT, VOLUME_PATH, _FLOOD],
        "volumeMounts": [{"name": VOLUME, "mountPath": VOLUME_PATH}],
    }
    return _job(like, namespace, "hostile", {}, agents, initContainers=[flood])


def waiting_job(like: Raw, namespace: str, name: str) -> Raw:
    """Return a TrainingJob with one replica that fits on no node."""
    return _job(like, namespace, name, {"requests": NO_NODE_HAS})


def _job(like: Raw, namespace: str, name: str, resources: Raw, replicas: int = 1, **pod: object) -> Raw:
    template = like["spec"]["template"]
    trainer = trainer_of(template)
    container = {
        "name": TRAINER,
        **_present_fields(trainer, OF_CONTAINER),
        "env": [variable for variable in trainer.get("env") or () if variable["name"] == PYTHON],
        "command": ["not-run"],
        "resources": resources,
    }
    spec = {
        **_present_fields(template["spec"], OF_POD),
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        **pod,
    }
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"replicas": replicas, "template": {"spec": spec}},
    }


def _present_fields(fields: Raw, names: tuple[str, ...]) -> Raw:
    return {name: fields[name] for name in names if name in fields}


def _namespaces(job: Raw, count: int) -> list[str]:
    return [f"concertina-drill-{job['metadata']['uid']}-{number}" for number in range(count)]


def _queue_jobs(environment: Mapping[str, str]) -> int:
    """Return the number of jobs that wait in the queue.

    Raises:
        UserError: When the environment variable is not a number in the valid range.
    """
    text = environment.get(QUEUE_JOBS) or str(DEFAULT_QUEUE_JOBS)
    if not text.isdecimal() or not 1 <= int(text) <= MOST_QUEUE_JOBS:
        raise UserError(f"{QUEUE_JOBS} is {text!r}: it must be a number from 1 to {MOST_QUEUE_JOBS}.")
    return int(text)


@asynccontextmanager
async def _tenants(target: DrillTarget, job: Raw, names: list[str]) -> AsyncIterator[None]:
    """Create namespaces with the labels of the job's own namespace, and delete them on exit.

    Namespaces from earlier drills of the same job are deleted first.

    Raises:
        UserError: When the operator is limited to a list of namespaces, so it would ignore new ones.
    """
    if watched := watched_namespaces(await target.operator()):
        raise UserError(
            f"The operator serves only {', '.join(watched)}, so it would not see jobs in the drill's own namespace."
        )
    home = await target.client.get(NAMESPACES, None, target.namespace)
    labels = {name: value for name, value in (home["metadata"].get("labels") or {}).items() if name != OWN_NAME}
    uid = job["metadata"]["uid"]
    await _remove_tenants(target, uid)
    try:
        for name in names:
            metadata = {"name": name, "labels": {**labels, DRILL_OF: uid}}
            namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
            await target.client.create(NAMESPACES, None, namespace)
        yield
    finally:
        await _remove_tenants(target, uid)


async def _remove_tenants(target: DrillTarget, uid: str) -> None:
    """Delete the namespaces of all drills of the job, and wait until they no longer exist.

    Raises:
        UserError: When the namespaces still exist after the time limit.
    """
    selector, deadline = f"{DRILL_OF}={uid}", time.monotonic() + GONE_SECONDS
    while remaining := (await target.client.list_all(NAMESPACES, None, selector))[0]:
        if time.monotonic() > deadline:
            raise UserError(f"`kubectl delete namespace -l {selector}` has not ended within {GONE_SECONDS:g} s.")
        for namespace in remaining:
            if "deletionTimestamp" not in namespace["metadata"]:
                await target.client.delete(NAMESPACES, None, namespace["metadata"]["name"])
        await asyncio.sleep(LOOK_SECONDS)


async def _until_held_back(target: DrillTarget, namespace: str, begun_at: float) -> None:
    """Wait until the operator's log says that the operator limits the messages of the agent in `namespace`.

    Raises:
        UserError: When the log does not report it in time.
    """
    since, deadline = rfc3339(int(begun_at) - SKEW), time.monotonic() + HELD_BACK_SECONDS
    while time.monotonic() < deadline:
        pod = (await target.operator())["metadata"]
        async for line in target.client.logs(pod["namespace"], pod["name"], since=since):
            if HELD_BACK in line and namespace in line:
                return
        await asyncio.sleep(LOOK_SECONDS)
    raise UserError(
        f"The operator has not throttled the agent of {namespace} within {HELD_BACK_SECONDS:g} s: its pod does "
        "not run, or the operator has no limit for it."
    )


async def _until_waiting(target: DrillTarget, names: list[str], count: int) -> None:
    """Wait until the operator has reported on at least `count` jobs in the namespaces `names`.

    The operator's report is any condition in the status of a job.

    Raises:
        UserError: When the operator has reported on fewer jobs after the time limit.
    """
    deadline = time.monotonic() + WAITING_SECONDS
    while True:
        jobs = [job for name in names for job in (await target.client.list_all(TRAINING_JOBS, name))[0]]
        reported_count = sum(bool(job.get("status", {}).get("conditions")) for job in jobs)
        if reported_count >= count:
            return
        if time.monotonic() > deadline:
            raise UserError(f"The operator has reported {reported_count} of {count} jobs within {WAITING_SECONDS:g} s.")
        await asyncio.sleep(LOOK_SECONDS)
