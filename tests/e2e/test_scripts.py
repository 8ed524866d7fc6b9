"""User's own script in an image without concertina, on real kubelets: it is killed, resized, suspended, continued."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from builders.cluster import e2e
from builders.cluster.e2e import Cluster, condition
from builders.programs import PROGRAMS

pytestmark = [pytest.mark.usefixtures("operator"), pytest.mark.timeout(1500)]
Object = dict[str, Any]
HURT = ("kill-worker", "kill-coordinator", "notice", "kill-node")


def template(kind: str) -> Object:
    """Return a pod that runs the script from a ConfigMap, in a plain Python with torch."""
    image = e2e.setting("SCRIPT_IMAGE")
    if not image:
        pytest.skip("set CONCERTINA_E2E_SCRIPT_IMAGE to an image with Python and nothing of concertina in it")
    command = ["python3", "-u", "/script/stateful.py", kind, "--pause", "0.05"]
    container = e2e.trainer(image=image, command=command, resources={"requests": {"cpu": "100m", "memory": "512Mi"}})
    container.setdefault("volumeMounts", []).append({"name": "script", "mountPath": "/script"})
    pod = e2e.pod(container)
    pod["volumes"].append({"name": "script", "configMap": {"name": "script"}})
    return pod


class Printed:
    """Output of the pods so far, because deleted pods lose their logs."""

    def __init__(self, cluster: Cluster, job: str) -> None:
        self._cluster, self._job = cluster, job
        self.losses: dict[int, set[float]] = {}
        self.starts: set[tuple[int, int]] = set()
        """Size of the world and step."""

    def look(self) -> None:
        for pod in self._cluster.pods(self._job):
            text = self._cluster.kubectl("logs", pod["metadata"]["name"], "-c", "trainer", check=False)
            for step, loss in re.findall(r"step (\d+) loss (\S+)", text):
                self.losses.setdefault(int(step), set()).add(float(loss))
            self.starts |= {(int(w), int(s)) for w, s in re.findall(r"of (\d+) starts at step (\d+)", text)}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_script_keeps_its_state_in_an_image_of_its_own(
    cluster: Cluster, play: Callable[[str, str], Any], kind: str
) -> None:
    pod = template(kind)
    script = {"stateful.py": (PROGRAMS / "stateful.py").read_text()}
    cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "script"}, "data": script})
    name = f"own-{kind}"
    job = e2e.own_job(
        name,
        pod,
        replicas=3,
        elastic={"minReplicas": 2, "scaleUp": {"stabilizationWindowSeconds": 1}},
        failurePolicy={"maxRestarts": 100},
        checkpoint={"uri": f"s3://{e2e.BUCKET}/{name}-{e2e.RUN}", "secretName": "s3", "everySeconds": 5},
    )
    with cluster.running(job):
        cluster.training(3, name=name)
        printed = Printed(cluster, name)
        for scenario in HURT:
            cluster.until("a snapshot", lambda status: (status.get("lastSnapshot") or {}).get("step", 0) > 5, name)
            printed.look()
            verdict = play(scenario, name)
            assert verdict["passed"], verdict["reasons"]
            assert verdict["seen"]["replayed"] <= 2
        printed.look()
        cluster.kubectl("scale", "tj", name, "--replicas=2")
        cluster.training(2, name=name)
        cluster.kubectl("patch", "tj", name, "--type=merge", "-p", '{"spec": {"suspend": true}}')
        status = cluster.until("rest", lambda status: condition(status, "Suspended")["status"] == "True", name)
        saved = status["lastCheckpoint"]["step"]
        cluster.kubectl("patch", "tj", name, "--type=merge", "-p", '{"spec": {"suspend": false}}')
        cluster.until("more steps", lambda status: status["progress"]["step"] > saved + 20, name)
        printed.look()
        assert (2, saved) in printed.starts
        assert "warmStartDisabledReason" not in cluster.status(name)
        differ = {step: losses for step, losses in printed.losses.items() if max(losses) - min(losses) > 1e-4}
        assert not differ, "a step trained again had another loss"
