"""Custom model on frames of features, on real kubelets: it learns, although it is killed and shrunk on the way."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import pytest

from builders.cluster import e2e
from builders.cluster.e2e import Cluster, Object
from builders.programs import AUDIO, AUDIO_FIELDS

pytestmark = [pytest.mark.usefixtures("operator"), pytest.mark.timeout(900)]
NAME, PACKAGE = "audio", "/own"
RESOURCES = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "1536Mi"}}
MODEL = {"entrypoint": "audio_model:spec", "options": {"dim": 32, "blocks": 2, "kernel": 5}, "sequenceLength": 50}
LEARNED = 0.6 * math.log(8)
"""Loss in nats below which the model has learned: a guess among the eight states has log(8)."""
LOST = 5
"""Maximum number of steps that a kill may lose; steps are some tens of milliseconds."""


@pytest.fixture
def frames(tmp_path: Path) -> str:
    uri = f"s3://{e2e.BUCKET}/audio-{e2e.RUN}"
    runpy.run_path(str(AUDIO / "make_features.py"))["main"](tmp_path, 60)
    e2e.concertina("data", "build", *AUDIO_FIELDS, "--out", uri, str(tmp_path))
    return uri


def own_code() -> Object:
    """Return a volume with the model's file, instead of an image that contains the package."""
    files = {"__init__.py": (AUDIO / "audio_model/__init__.py").read_text()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}, "data": files}


def with_own_code(container: Object) -> Object:
    """Return a pod with that container, whose Python finds the package."""
    path = ":".join(filter(None, [e2e.SITE_PACKAGES and e2e.SITE, PACKAGE]))
    others = [each for each in container.get("env", ()) if each["name"] != "PYTHONPATH"]
    mounts = [*container.get("volumeMounts", ()), {"name": "own", "mountPath": f"{PACKAGE}/audio_model"}]
    pod = e2e.pod(container | {"env": [*others, {"name": "PYTHONPATH", "value": path}], "volumeMounts": mounts})
    return pod | {"volumes": [*pod["volumes"], {"name": "own", "configMap": {"name": NAME}}]}


def test_it_learns_is_killed_and_shrunk(cluster: Cluster, frames: str) -> None:
    template = with_own_code(e2e.trainer(resources=RESOURCES))
    job = e2e.bundled_job(NAME, template, model=MODEL, data={"uri": frames})
    job["spec"] |= {"replicas": 3, "elastic": {"minReplicas": 2}, "parallelism": {"shard": 1}}
    cluster.apply(own_code())
    try:
        with cluster.running(job):
            first = cluster.training(3, name=NAME)
            assert first["world"]["layout"] == "replicate 3"
            cluster.kubectl("delete", "pod", first["world"]["members"][0]["replica"], "--grace-period=0", "--force")
            whole = cluster.training(3, above=first["world"]["round"], name=NAME)
            assert whole["restarts"]["total"] == 1
            assert whole.get("stepsReplayed", 0) <= LOST
            cluster.kubectl("patch", "tj", NAME, "--type=merge", "-p", json.dumps({"spec": {"replicas": 2}}))
            small = cluster.training(2, above=whole["world"]["round"], name=NAME)
            assert small.get("stepsReplayed", 0) == whole.get("stepsReplayed", 0)
            learns = lambda status: status["progress"]["loss"] < LEARNED  # noqa: E731
            cluster.until("a loss below that of guesses", learns, NAME)
    finally:
        cluster.kubectl("delete", "configmap", NAME, "--ignore-not-found")
