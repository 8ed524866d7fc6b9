"""Cost of metrics: `python benchmarks/metrics.py [--jobs N] [--pods N] [--scrapes N] [--json FILE]`.

An operator's cache contains the given number of jobs and pods, in the form in which the API server sends them. The
operator's real endpoint is scraped over HTTP. The benchmark prints the processor seconds of a scrape (without those of
the scraper), the share of a core at one scrape every 15 s, the longest time for which the event loop was blocked, and
the memory of the process. For an agent, it prints the cost of one scrape and of one reported step.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import resource
import time
import urllib.request
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import report

import concertina_protocol as p
from concertina.api.accounting import CLASSES, MOST_INCIDENTS, SUFFIX
from concertina.api.loss_history import MOST_POINTS, LossHistory, Point
from concertina.api.status import rfc3339
from concertina.controller import serving
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.controller.job_metrics import JobCollector
from concertina.controller.settings import from_environment
from concertina.kube.parse.views import pod_view
from concertina.local.host.processes import free_ports
from concertina_agent.metrics import worker_processes
from concertina_agent.metrics.exposition import render
from concertina_agent.metrics.training import Training

INTERVAL_SECONDS = 15.0
TICK_SECONDS = 0.005
BEGUN = 1_700_000_000.0
STEPS = 20_000


def job(number: int, pods: int) -> dict[str, Any]:
    """Return a job that trains, with a spec and a status as large as after a long run with failures."""
    at, name = rfc3339(BEGUN), f"training-job-{number:04}"
    members = [
        {"replica": f"{name}-{index}-0", "uid": f"{number:04}-{index:04}", "instance": "0" * 16, "node": f"n-{index}",
         "workers": 8}
        for index in range(pods)
    ]  # fmt: skip
    reasons = ("NodeLost", "OutOfMemory", "WorkerFailed")
    failures = [
        {"at": at, "replica": members[0]["replica"], "reason": reason, "step": 7, "action": "RestartWorkers"}
        for reason in reasons
    ]
    conditions = [
        {"type": kind, "status": status, "reason": "Training", "message": "10 replicas train", "lastTransitionTime": at}
        for kind, status in (("Ready", "True"), ("Running", "True"), ("Stalled", "False"), ("Suspended", "False"))
    ]
    points = tuple(Point(int(BEGUN) + 64 * n, 100 * n + number, 10 / (n + 1), pods) for n in range(MOST_POINTS))
    incident = {
        "at": at,
        "round": 2,
        "cause": "NodeLost",
        "replica": members[0]["replica"],
        "node": "n-0",
        "seconds": 3,
    }
    last = {"at": at, "round": 2, "reason": "NodeLost", "message": "node n-0 is gone", "lastLines": ["a line"] * 20}
    spent = {f"{name.removesuffix(SUFFIX)}Seconds": 100.0 for name in CLASSES}
    recovery = [{"cause": reason, "times": 1, "seconds": 10.0} for reason in reasons]
    checkpoint = {"uri": f"s3://bucket/{name}", "everySeconds": "Auto", "secretName": "s3"}
    container = {"name": "trainer", "image": "registry.example/concertina/trainer:0.1.0"}
    return {
        "metadata": {
            "name": name, "namespace": f"team-{number % 50}", "uid": f"uid-{number}", "generation": 1,
            "resourceVersion": "1", "creationTimestamp": at,
        },
        "spec": {
            "replicas": pods, "elastic": {"minReplicas": 1}, "price": {"perReplicaHour": "10.0"},
            "checkpoint": checkpoint, "template": {"spec": {"containers": [container]}},
            "tracking": {"backend": "MLflow", "uri": "http://mlflow.mlflow:5000"},
            "trainer": {"steps": 9000, "data": {"uri": "s3://bucket/data"}},
        },
        "status": {
            "conditions": conditions, "startTime": at, "replicas": pods, "rounds": 3, "stepsReplayed": 2,
            "world": {"round": 3, "replicas": pods, "workers": 8 * pods, "members": members, "since": at,
                      "coordinator": members[0]["replica"]},
            "progress": {"step": 1000 + number, "steps": 9000, "loss": 2.5, "tokensPerSecond": 1e5, "mfu": 0.4,
                         "tokens": 10**9, "stepSeconds": 0.5, "at": at},
            "lastCheckpoint": {"step": 900, "uri": "s3://bucket/run", "at": at},
            "lastSnapshot": {"step": 999, "at": at},
            "checkpointInterval": {"seconds": 300, "suggestedSeconds": 300},
            "restarts": {"budget": 7, "total": 3, "recent": failures},
            "avoidedNodes": [{"node": "a", "until": at}],
            "goodput": {**spent, "percent": 90.0, "tokensPerSecond": 9e4, "recovery": recovery, "at": at},
            "history": LossHistory(64, points).packed(), "incidents": [incident] * MOST_INCIDENTS, "lastFailure": last,
            "cost": {"currency": "USD", "total": 123.4, "replicaHours": 12.3, "perMillionTokens": 0.5},
        },
    }  # fmt: skip


def pod(number: int, index: int) -> dict[str, Any]:
    name = f"training-job-{number:04}"
    return {
        "metadata": {
            "name": f"{name}-{index}-0", "namespace": f"team-{number % 50}", "uid": f"{number:04}-{index:04}",
            "creationTimestamp": rfc3339(BEGUN), "ownerReferences": [{"uid": f"uid-{number}", "controller": True}],
            "labels": {"concertina.dev/job-uid": f"uid-{number}", "concertina.dev/replica-index": str(index),
                       "concertina.dev/attempt": "0"},
        },
        "spec": {"nodeName": f"node-{index}", "containers": [{"name": "trainer"}]},
        "status": {"phase": "Running", "podIP": "10.0.0.1"},
    }  # fmt: skip


def scrape(url: str, scrapes: int, pipe: Pipe) -> None:
    """Scrape the endpoint from a separate process, as Prometheus does."""
    size = 0
    for _ in range(scrapes):
        pipe.recv()
        with urllib.request.urlopen(url, timeout=120) as answer:
            text = answer.read()
        size = text.count(b"\n") - 2 * text.count(b"# TYPE")
        pipe.send((len(text), size))


def resident_mebibytes() -> float:
    return worker_processes.own()[1] / (1 << 20)


async def _operator(jobs: int, pods: int, scrapes: int) -> dict[str, list[float]]:
    empty = resident_mebibytes()
    cache = ClusterCache(lambda uid: None, lambda uid: {})
    for number in range(jobs):
        cache.on_job(job(number, pods))
        for index in range(pods):
            cache.on_pod(None, pod_view(pod(number, index)))
    gc.collect()
    rows: dict[str, list[float]] = {
        "memory without jobs, MiB": [empty],
        "memory with them, MiB": [resident_mebibytes()],
    }
    (port,) = free_ports("127.0.0.1", 1)
    names = {"CONCERTINA_NAMESPACE": "n", "CONCERTINA_MASTER_KEY_SECRET": "s", "CONCERTINA_IMAGE_AGENT": "i"}
    settings = from_environment({**names, "CONCERTINA_METRICS": f"127.0.0.1:{port}"})
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    arguments = (f"http://127.0.0.1:{port}/metrics", scrapes, theirs)
    scraper = multiprocessing.get_context("spawn").Process(target=scrape, args=arguments, daemon=True)
    scraper.start()
    worst = 0.0

    async def watch_loop() -> None:
        nonlocal worst
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)
            worst = max(worst, time.monotonic() - before - TICK_SECONDS)

    for name in ("processor seconds of a scrape", "part of a core, each 15 s", "loop stood still, s", "series"):
        rows[name] = []
    async with serving.endpoints(settings, [lambda: JobCollector([cached_job.view for cached_job in cache.jobs()])]):
        watching = asyncio.create_task(watch_loop())
        for _ in range(scrapes):
            await asyncio.sleep(0.2)
            worst, used = 0.0, time.process_time()
            ours.send(None)
            _, series = await asyncio.to_thread(ours.recv)
            seconds = time.process_time() - used
            rows["processor seconds of a scrape"].append(seconds)
            rows["part of a core, each 15 s"].append(seconds / INTERVAL_SECONDS)
            rows["loop stood still, s"].append(worst)
            rows["series"].append(series)
        watching.cancel()
    rows["memory after the scrapes, MiB"] = [resident_mebibytes()]
    rows["most memory ever, MiB"] = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]
    return rows


def progress(metrics: int = p.MOST_METRICS) -> p.Progress:
    """Return a progress report of rank 0 with the given number of custom metrics."""
    return p.Progress(
        0, 9000, 2.5, 1e5, 0.3, 0, "training", BEGUN, BEGUN, tokens=0, mfu=0.4,
        seconds={part.value: 0.0 for part in p.StepPart},
        metrics={f"m{number}": 1.0 for number in range(metrics)},
    )  # fmt: skip


def _agent() -> dict[str, list[float]]:
    training = Training()
    told = [p.Progress(**{**vars(progress()), "step": step, "tokens": step}) for step in range(STEPS)]
    used = time.process_time()
    for each in told:
        training.on_progress(1, each, 0.0)
    rows = {"a step that is told of, us": [(time.process_time() - used) / STEPS * 1e6]}
    scrapes, workers = [], worker_processes.WorkerProcesses()
    for _ in range(50):
        used = time.process_time()
        workers.look([worker_processes.WorkerProcess(0, 0, (1,))])
        render(training.samples(told[-1], None, 0.0), (("namespace", "n"), ("trainingjob", "j"), ("replica", "r")))
        scrapes.append((time.process_time() - used) * 1e3)
    return {**rows, "a scrape, ms": scrapes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=10, help="of each job")
    parser.add_argument("--scrapes", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = asyncio.run(_operator(options.jobs, options.pods, options.scrapes))
    agent = {f"agent: {name}": values for name, values in _agent().items()}
    report.show(f"{options.jobs} jobs of {options.pods} pods, scraped {options.scrapes} times", rows, unit="")
    report.show("one agent", agent, unit="")
    report.write(options.json, "metrics", {**rows, **agent}, jobs=options.jobs, pods=options.pods)


if __name__ == "__main__":
    main()
