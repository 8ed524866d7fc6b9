"""Job of a run, drawn from its seed: sizes, policies, and the restart of its containers."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from concertina.api.parse import parse_spec
from concertina.api.spec import JobSpec
from simulation.parts.lineage import BATCH

if TYPE_CHECKING:
    from simulation.runs.world import World


def job_spec(world: World, least: int, calm: bool) -> JobSpec:
    """Return the spec; `least` is the smallest number of replicas with which the job continues."""
    random, seed = world.clock.random, world.seed
    elastic: dict[str, Any] = {}
    if least < world.replicas:
        elastic = {
            "minReplicas": least,
            "scaleUp": {"stabilizationWindowSeconds": 30 if calm else random.choice((0, 2, 5))},
        }
    if seed % 3 == 2 and not calm:
        elastic["standbyReplicas"] = 1
    manifest: dict[str, Any] = {
        "replicas": world.replicas,
        "workersPerReplica": world.workers,
        "template": {"spec": {"containers": [{"name": "trainer", "image": "concertina/trainer"}]}},
        "trainer": _trainer(world.steps, Random(f"anomalies of {seed}")),
        "checkpoint": {"uri": "s3://bucket/run"},
        "failurePolicy": _policy(random),
        "parallelism": world.parallelism,
    }
    if random.random() < 0.25:
        manifest["template"]["spec"]["restartPolicy"] = "OnFailure"
    if elastic:
        manifest["elastic"] = elastic
    return parse_spec({"spec": manifest})


def _trainer(steps: int, random: Random) -> dict[str, Any]:
    anomalies = {
        "nonFinite": random.choice(("Skip", "RollBack", "RollBack")),
        "spike": random.choice(("Ignore", "Skip", "RollBack")),
        "rollbackSteps": random.choice((1, 3, 8)),
        "corruptionCheckSteps": random.choice((3, 5, 10)),
    }
    return {"steps": steps, "data": {"uri": "/data"}, "globalBatchSize": BATCH, "anomalies": anomalies}


def _policy(random: Any) -> dict[str, Any]:
    policy: dict[str, Any] = {"maxRestarts": 1000, "onHang": random.choice(("Replace", "Replace", "Report"))}
    policy["onStraggler"] = random.choice(("Report", "Replace"))
    if random.random() < 0.7:
        policy["hangTimeoutSeconds"] = random.choice((8, 15))
    return policy
