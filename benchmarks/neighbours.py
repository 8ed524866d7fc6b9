"""Effect of other tenants on a job: `python benchmarks/neighbours.py [--json FILE] [--only ...]`.

On a local cluster, jobs with one replica run one after the other. At first they run alone. Then another namespace
requests as many replicas as the schema allows, which no node can run. For each small job, the benchmark measures the
time from its creation to its first status, to its pod, to its pod's node, and to Complete. It also measures the delay
between a training job's script, which reports a step every 0.1 s, and the job's status, whose progress is written every
1.5 s.

After that, a worker of a healthy job is killed several times (`concertina drill --scenario kill-worker`): alone, while
many jobs of other namespaces wait for resources, and while agents of another namespace send messages as fast as they
can. During this time, the benchmark requests the operator's health endpoint every 20 ms. The operator's event loop
handles these requests, so the delay of a response is at least the delay of the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
from floods import held_back
from recovery_concertina import bundled
from until import until

from concertina.api.spec import MOST_REPLICAS
from concertina.api.status import unix_seconds
from concertina.demo import stage as stages
from concertina.demo.stage import SYSTEM, Stage
from concertina.drill.faults import tenants
from concertina.drill.run import run as play
from concertina.drill.scenarios import SCENARIOS
from concertina.drill.target import DrillTarget
from concertina.local import cluster
from concertina.terminal.cluster_connection import Target

LIMIT = 180.0
ALONE, BESIDE = "alone", "beside the largest job"
HEALTHY, TENANTS = "healthy", "tenants"
"""Name of the job whose worker is killed, and namespace of the other tenants."""
HEALTH_PORT, ASK_SECONDS, AT_LEAST_SECONDS = 8080, 0.02, 60.0
"""Settings of the requests to the operator's health endpoint.

They are its port, the seconds between two requests, and the minimum duration of the measurement in seconds.
"""
LARGEST, QUEUE, FLOOD = "largest", "queue", "flood"
JOBS = "/apis/concertina.dev/v1beta1/namespaces/{}/trainingjobs"
STEPS = """
import time, trainingjob
step = 0
while True:
    time.sleep(0.1)
    step += 1
    trainingjob.report(step=step, loss=0.0)
"""


def job(name: str, namespace: str, script: str, replicas: int = 1, **pod: Any) -> dict[str, Any]:
    container = {"name": "trainer", "image": "concertina/trainer:bench", "command": ["python3", "-uc", script]}
    spec = {"replicas": replicas, "template": {"spec": {"containers": [container], **pod}}}
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "concertina.dev/v1beta1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}


def small(stage: Stage, name: str, samples: dict[str, list[float]], kind: str) -> None:
    """Measure the phases of one small job from its creation to its end."""
    begun = time.time()
    stage.cluster.api.call("POST", JOBS.format("small"), job(name, "small", "pass"))

    def reached(condition: Callable[[dict[str, Any]], Any]) -> float:
        def look() -> float | None:
            return time.time() if condition(stage.job(name, "small").get("status") or {}) else None

        return float(until(name, LIMIT, look)) - begun

    samples[f"first status, {kind}"].append(reached(lambda status: status.get("conditions")))
    until(f"{name}'s pod", LIMIT, lambda: stage.pods(name, "small"))
    samples[f"pod, {kind}"].append(time.time() - begun)
    until(f"{name}'s node", LIMIT, lambda: stage.pods(name, "small")[0]["spec"].get("nodeName"))
    samples[f"pod has a node, {kind}"].append(time.time() - begun)

    def complete(status: dict[str, Any]) -> bool:
        return any(
            condition["type"] == "Complete" and condition["status"] == "True"
            for condition in status.get("conditions", ())
        )

    samples[f"complete, {kind}"].append(reached(complete))


def lags(stage: Stage, samples: list[float], stop: threading.Event) -> None:
    """Record, twice a second, how many seconds old the progress in the job's status is.

    Stop when `stop` is set.
    """
    while not stop.wait(0.5):
        at = stage.job("trains", "small")["status"]["progress"]["at"]
        samples.append(time.time() - unix_seconds(at))


def measure(stage: Stage, runs: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = defaultdict(list)
    for kind in (ALONE, BESIDE):
        stop, path = threading.Event(), JOBS.format("large")
        watching = threading.Thread(target=lags, args=(stage, samples[f"lag of a status, {kind}"], stop))
        watching.start()
        if kind is BESIDE:
            wanted = job("large", "large", "pass", MOST_REPLICAS, nodeSelector={"no": "node"})
            stage.cluster.api.call("POST", path, wanted)
        for run in range(runs):
            small(stage, f"{kind.split()[0]}-{run}", samples, kind)
        if kind is BESIDE:
            until("the pods", LIMIT, lambda: len(stage.pods("large", "large")) == MOST_REPLICAS)
            stage.cluster.api.call("DELETE", f"{path}/large")
            small(stage, "after", samples, "while it is deleted")
        stop.set()
        watching.join()
    return dict(samples)


def answers(stage: Stage, samples: list[float], stop: threading.Event) -> None:
    """Record the delays of the operator's health endpoint.

    A request is due every ASK_SECONDS. If a response is late, the requests that become due in that time count as late
    too.
    """
    (pod,) = stage.cluster.api.call("GET", f"/api/v1/namespaces/{SYSTEM}/pods")["items"]
    url, due = f"http://{pod['status']['podIP']}:{HEALTH_PORT}/healthz", time.monotonic()
    while not stop.wait(max(0.0, due - time.monotonic())):
        with urllib.request.urlopen(url, timeout=LIMIT) as answer:
            answer.read()
        answered = time.monotonic()
        while due <= answered:
            samples.append(answered - due)
            due += ASK_SECONDS


async def recoveries(stage: Stage, runs: int) -> list[float]:
    """Return the seconds from each kill of a worker to the next step."""
    times, scenario = [], SCENARIOS["kill-worker"]
    async with Target(stage.cluster.record.kubeconfig, None, "default").connect() as (client, namespace):
        job = DrillTarget(client, namespace, HEALTHY, cluster.serving(client.access.server))
        for _ in range(runs):
            verdict = await play(job, "kill-worker", scenario, scenario.fault(job), print)
            seconds = verdict.seen.seconds.first_step
            times.append(float("inf") if seconds is None else seconds)
    return times


def recover(stage: Stage, runs: int, kind: str, samples: dict[str, list[float]]) -> None:
    """Measure the recoveries of a healthy job, and at the same time the delays of the operator's health endpoint."""
    stop, begun, late = threading.Event(), time.monotonic(), samples.setdefault(f"the operator's answer, {kind}", [])
    asking = threading.Thread(target=answers, args=(stage, late, stop))
    asking.start()
    try:
        samples[f"recovery, {kind}"] = asyncio.run(recoveries(stage, runs))
        time.sleep(max(0.0, AT_LEAST_SECONDS - (time.monotonic() - begun)))
    finally:
        stop.set()
        asking.join()


def others(stage: Stage, jobs: list[dict[str, Any]]) -> None:
    """Create jobs in the namespace TENANTS, and wait until the operator has written a status for each job."""
    stage.cluster.create_namespace(TENANTS)
    for each in jobs:
        stage.cluster.api.call("POST", JOBS.format(TENANTS), each)

    def told() -> bool:
        found = stage.cluster.api.call("GET", JOBS.format(TENANTS))["items"]
        return sum(bool(each.get("status", {}).get("conditions")) for each in found) == len(jobs)

    until("word of the jobs", 5 * LIMIT, told)


def isolate(stage: Stage, options: argparse.Namespace, only: list[str]) -> dict[str, list[float]]:
    """Measure recoveries without other tenants, and with each kind of other tenants in `only`."""
    samples: dict[str, list[float]] = {}
    for _ in stages.build_data(stage.storage):
        pass
    healthy = bundled()
    healthy["metadata"]["name"] = HEALTHY
    stage.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(healthy))
    recover(stage, options.runs, ALONE, samples)
    waits = [tenants.waiting_job(healthy, TENANTS, f"waits-{number}") for number in range(options.jobs)]
    floods = [tenants.hostile_job(healthy, TENANTS, options.agents)]
    kinds = {QUEUE: (f"beside {options.jobs} waiting jobs", waits), FLOOD: (f"beside {options.agents} floods", floods)}
    for name in only:
        kind, jobs = kinds[name]
        others(stage, jobs)
        if name == FLOOD:
            until("a flood that is held back", LIMIT, lambda: held_back(stage, TENANTS))
        recover(stage, options.runs, kind, samples)
        stage.cluster.kubectl("delete", "namespace", TENANTS, "--timeout=600s")
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=(LARGEST, QUEUE, FLOOD), default=[LARGEST, QUEUE, FLOOD])
    parser.add_argument("--jobs", type=int, default=1000, help="that wait for room")
    parser.add_argument("--agents", type=int, default=4, help="that flood the operator")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    samples: dict[str, list[float]] = {}
    isolated = [name for name in options.only if name != LARGEST]
    with stages.standing("bench-neighbours", 3, report.step) as stage:
        if LARGEST in options.only:
            for namespace in ("small", "large"):
                stage.cluster.create_namespace(namespace)
            stage.cluster.api.call("POST", JOBS.format("small"), job("trains", "small", STEPS))
            until("progress", LIMIT, lambda: (stage.job("trains", "small").get("status") or {}).get("progress"))
            samples |= measure(stage, options.runs)
            stage.cluster.kubectl("delete", "namespace", "small", "large", "--timeout=600s")
        if isolated:
            samples |= isolate(stage, options, isolated)
    report.show("What other tenants cost a job", samples)
    report.write(options.json, "neighbours", samples, replicas=MOST_REPLICAS, jobs=options.jobs, agents=options.agents)


if __name__ == "__main__":
    main()
