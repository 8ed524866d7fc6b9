"""Preemption in a queue of Kueue: a job that shrinks, compared with a JobSet that Kueue suspends and queues again.

    PYTHONPATH=tests python benchmarks/queues.py [--runs 3] [--only KIND ...] [--json FILE]

The benchmark needs `make kueue` and `make jobset`. On a local cluster with four GPUs (a number of its nodes), a job
with four workers trains in a queue. Then a job with three workers and a higher priority is created. It trains for some
seconds, and is deleted. Both jobs are of the same kind:
- TrainingJob, shrinks: the first job continues with one worker (`trainingjob.State`).
- TrainingJob, suspended: with `onPreemption: Suspend`, the first job returns all quota, and starts again with the rest.
- JobSet: Kueue suspends the first job, and queues it again.
- JobSet, saves when stopped: the same, but the ranks save at SIGTERM. Kueue and JobSet don't do that by themselves.

The scripts train the same model with the same pause after each step. They write a checkpoint every
`--checkpoint-seconds`. These values are measured for each kind:
- seconds from the creation of the second job to its admission and to its first step;
- seconds from the eviction of the first job to the first step of the second job;
- seconds from the deletion of the second job to the first step of all four workers;
- steps that the first job lost at each change of its number of workers;
- steps of the first job while the second job trained.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import report
from queues_jobset import FRAMEWORK, JOB_SETS, JobSets, job_set
from recovery_torchrun import Step, steps
from until import until

from builders.cluster.controllers import serving
from builders.cluster.kueue import JOB_KIND, Kueue
from builders.cluster.queues import (
    API_VERSION,
    KUEUE,
    Client,
    cluster_queue,
    evicted,
    is_true,
    local_queue,
    priority_class,
    resource_flavor,
)
from concertina.demo import stage as stages

Object = dict[str, Any]
ALL, HIGH = 4, 3
"""Number of workers of the first job and of the second job."""
QUEUE, PRIORITY, FLAVOR = "team", "high", "gpu-nodes"
GPU = {"nvidia.com/gpu": "1"}
TRAINS_SECONDS = 10.0
"""Seconds for which the second job trains before it is deleted."""
LIMIT = 240.0
TRAINING_JOBS = "/apis/concertina.dev/v1beta1/namespaces/default/trainingjobs"
SCRIPTS = Path(__file__).parent / "scripts"
Made = Callable[[str, Object, int, Path], Object]


@dataclass(frozen=True)
class Kind:
    """Kind of the two jobs of a run.

    `path` is the API path. `make` returns a job for a name, labels, a number of workers and a trace folder.
    """

    path: str
    make: Made


def training_job(policy: str, seconds: int, name: str, labels: Object, workers: int, trace: Path) -> Object:
    """Return an elastic job of a script that saves its state with `trainingjob.State`."""
    command = ["python3", str(SCRIPTS / "elastic_state.py"), "ddp", "--trace", str(trace)]
    container = {
        "name": "trainer",
        "image": "concertina/trainer:bench",
        "command": command,
        "resources": {"limits": GPU},
    }
    elastic = {"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 0}, "onPreemption": policy}
    return {
        "apiVersion": "concertina.dev/v1beta1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": workers,
            "elastic": elastic,
            "warmStart": {"enabled": True},
            "checkpoint": {"uri": f"file://{trace}/checkpoints", "everySeconds": seconds},
            "template": {"spec": {"containers": [container]}},
        },
    }


def kinds(checkpoint_seconds: int) -> Mapping[str, Kind]:
    def of_job_set(saves: bool) -> Made:
        resources = {"limits": GPU}
        return lambda name, labels, workers, trace: job_set(
            name, labels, workers, resources, trace, checkpoint_seconds, saves
        )

    def of_training_job(policy: str) -> Made:
        return lambda name, labels, workers, trace: training_job(
            policy, checkpoint_seconds, name, labels, workers, trace
        )

    return {
        "TrainingJob, shrinks": Kind(TRAINING_JOBS, of_training_job("Shrink")),
        "JobSet": Kind(JOB_SETS, of_job_set(saves=False)),
        "TrainingJob, suspended": Kind(TRAINING_JOBS, of_training_job("Suspend")),
        "JobSet, saves when stopped": Kind(JOB_SETS, of_job_set(saves=True)),
    }


@dataclass
class Bench:
    """Cluster with Kueue, JobSet and the operator, and with a queue whose quota is all GPUs of the cluster (`ALL`)."""

    client: Client
    folder: Path
    evicted_at: dict[str, float] = field(default_factory=dict)
    """Unix time of the first eviction of each job, by job name."""
    admitted_at: dict[str, float] = field(default_factory=dict)
    """Unix time of the first admission of each job, by job name."""

    def create_queue(self) -> None:
        quota = [{"name": name, "nominalQuota": str(ALL)} for name in GPU]
        groups = [{"coveredResources": list(GPU), "flavors": [{"name": FLAVOR, "resources": quota}]}]
        self.client.call("POST", f"{KUEUE}/resourceflavors", resource_flavor(FLAVOR))
        self.client.call("POST", f"{KUEUE}/workloadpriorityclasses", priority_class(PRIORITY, 1000))
        self.client.call("POST", f"{KUEUE}/clusterqueues", cluster_queue(QUEUE, FLAVOR, 0, resourceGroups=groups))
        self.client.call("POST", f"{KUEUE}/namespaces/default/localqueues", local_queue("default", QUEUE, QUEUE))

    def hear(self, event: Object) -> None:
        """Handle a watch event of a Workload."""
        item = event["object"]
        for owner in item["metadata"].get("ownerReferences", ()):
            if evicted(item):
                self.evicted_at.setdefault(owner["name"], time.time())
            if is_true(item, "Admitted"):
                self.admitted_at.setdefault(owner["name"], time.time())

    def run(self, kind: Kind, number: str, trains: float) -> dict[str, float]:
        """Run one preemption, and return the measured values by row.

        Args:
            kind: Kind of both jobs.
            number: Suffix of the job names.
            trains: Seconds for which the first job trains before it is preempted.
        """
        first, second = f"low-{number}", f"high-{number}"
        low, high = self._create(kind, first, ALL), self.folder / second
        self._trains(low, ALL, trains)
        created = time.time()
        self._create(kind, second, HIGH, {"kueue.x-k8s.io/priority-class": PRIORITY})
        first_step = self._trains(high, HIGH)
        self._trains(high, HIGH, TRAINS_SECONDS)
        deleted = time.time()
        self._delete(kind, second)
        whole = until(f"{first} whole again", LIMIT, lambda: _first(low, ALL, deleted))
        self._delete(kind, first)
        done = [step for step in steps(low) if step.rank == 0]
        return {
            "from the creation of the preemptor to its admission": self.admitted_at[second] - created,
            "from the creation of the preemptor to its first step": first_step.at - created,
            "from the eviction to the first step of the preemptor": first_step.at - self.evicted_at[first],
            "from the end of the preemptor to a step of all workers": whole.at - deleted,
            STEPS_LOST: lost(done),
            STEPS_MEANWHILE: sum(first_step.at < step.at < deleted for step in done),
        }

    def _create(self, kind: Kind, name: str, workers: int, labels: Object | None = None) -> Path:
        trace = self.folder / name
        trace.mkdir()
        body = kind.make(name, {"kueue.x-k8s.io/queue-name": QUEUE, **(labels or {})}, workers, trace)
        self.client.call("POST", kind.path, body)
        return trace

    def _trains(self, trace: Path, workers: int, seconds: float = 0.0) -> Step:
        """Wait until training with `workers` ranks has lasted `seconds`, and return its first step."""

        def long() -> Step | None:
            taken = [step for step in steps(trace) if step.world == workers]
            return taken[0] if taken and taken[-1].at - taken[0].at >= seconds else None

        step: Step = until(f"{trace.name} with {workers} workers", LIMIT, long)
        return step

    def _delete(self, kind: Kind, name: str) -> None:
        self.client.call("DELETE", f"{kind.path}/{name}", {"propagationPolicy": "Background"})
        if name.startswith("low"):
            path = "/api/v1/namespaces/default/pods"
            until("no pods", LIMIT, lambda: not self.client.call("GET", path)["items"])


STEPS_LOST, STEPS_MEANWHILE = "steps lost", "steps of the first job while the preemptor trains"


def _first(trace: Path, workers: int, after: float) -> Step | None:
    return next((step for step in steps(trace) if step.world == workers and step.at > after), None)


def lost(done: Sequence[Step]) -> int:
    """Return the number of steps that rank 0 had to train again, because it continued from an earlier step."""
    return sum(max(0, one.step - other.step + 1) for one, other in pairwise(done))


def main() -> None:
    """Run all kinds in turns, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each kind")
    parser.add_argument("--checkpoint-seconds", type=int, default=10, help="between two checkpoints of a JobSet")
    parser.add_argument("--only", nargs="+", choices=list(kinds(0)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    all_kinds = kinds(options.checkpoint_seconds)
    chosen = {name: all_kinds[name] for name in options.only or all_kinds}
    folder = Path(tempfile.mkdtemp(prefix="queues-"))
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    try:
        with ExitStack() as stack:
            stage = stack.enter_context(stages.standing(f"queues-{os.getpid()}", ALL, report.step))
            client = Client.of_local(stage.cluster)
            kubeconfig = stage.cluster.kubeconfig
            stack.enter_context(serving(JobSets(kubeconfig, client, made(folder / "jobset"))))
            frameworks = {"integrations": {"frameworks": [FRAMEWORK], "externalFrameworks": [JOB_KIND]}}
            stack.enter_context(serving(Kueue(kubeconfig, client, made(folder / "kueue"), **frameworks)))
            bench = Bench(client, folder)
            bench.create_queue()
            stack.enter_context(client.watching(f"/apis/{API_VERSION}/workloads", bench.hear))
            for number in range(options.runs):
                # Preemptions are spread evenly over the time between two checkpoints.
                trains = options.checkpoint_seconds * (1 + (number + 0.5) / options.runs)
                for place, (name, kind) in enumerate(chosen.items()):
                    for row, figure in bench.run(kind, f"{number}-{place}", trains).items():
                        figures[row][name].append(figure)
                        print(f"run {number}, {name}: {row}: {figure:.1f}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds: dict[str, list[float]] = {}
    counts: dict[str, list[float]] = {}
    for row, samples in figures.items():
        is_count = row in (STEPS_LOST, STEPS_MEANWHILE)
        report.show(row, samples, unit="steps" if is_count else "s")
        (counts if is_count else seconds).update({f"{name}: {row}": values for name, values in samples.items()})
    report.write(options.json, "queues", seconds, steps=counts, checkpoint_seconds=options.checkpoint_seconds)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
