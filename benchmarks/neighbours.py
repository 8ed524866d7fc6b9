"""What one tenant's largest job costs everybody else: `python benchmarks/neighbours.py [--json FILE]`.

On a local cluster, jobs of one replica run to their end one after the other: first alone, then while another namespace
asks for as many replicas as the schema allows, none of which any node takes. Measured for each small job: from its
creation to its first status, to its pod, to its pod's node, and to Complete; and how far the status of a job that
trains is behind its script, which reports a step every 0.1 s (progress is written every 1.5 s)."""

from __future__ import annotations

import argparse
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
from until import until

from concertina.api.spec import MOST_REPLICAS
from concertina.api.status import unix_seconds
from concertina.demo import stage as stages
from concertina.demo.stage import Stage

LIMIT = 180.0
ALONE, BESIDE = "alone", "beside the largest job"
JOBS = "/apis/concertina.dev/v1alpha1/namespaces/{}/trainingjobs"
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
    return {"apiVersion": "concertina.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}


def small(stage: Stage, name: str, samples: dict[str, list[float]], kind: str) -> None:
    """One small job from its creation to its end."""
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
        return any(each["type"] == "Complete" and each["status"] == "True" for each in status.get("conditions", ()))

    samples[f"complete, {kind}"].append(reached(complete))


def lags(stage: Stage, samples: list[float], stop: threading.Event) -> None:
    """By how many seconds the progress of the job that trains is behind in its status, twice a second."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    with stages.standing("bench-neighbours", 3, report.step) as stage:
        for namespace in ("small", "large"):
            stage.cluster.create_namespace(namespace)
        stage.cluster.api.call("POST", JOBS.format("small"), job("trains", "small", STEPS))
        until("progress", LIMIT, lambda: (stage.job("trains", "small").get("status") or {}).get("progress"))
        samples = measure(stage, options.runs)
    report.show(f"One tenant asks for {MOST_REPLICAS} replicas: what others wait", samples)
    report.write(options.json, "neighbours", samples, replicas=MOST_REPLICAS)


if __name__ == "__main__":
    main()
