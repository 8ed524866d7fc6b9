"""What the end-to-end tests need of a cluster that is not ours: names, manifests, kubectl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from concertina.local import binaries

Object = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
GIVE_UP = 240.0
CLUSTER_WIDE = ("ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "Namespace")
JOB = "drilled"


def setting(name: str, default: str = "") -> str:
    return os.environ.get(f"CONCERTINA_E2E_{name}", default)


NAMESPACE = setting("NAMESPACE", "concertina-e2e")
IMAGE, TAG = setting("IMAGE", "concertina/operator"), setting("TAG", "0.1.0")
"""Of operator, agent and trainer where the next ones don't say otherwise."""
AGENT_IMAGE, TRAINER_IMAGE = setting("AGENT_IMAGE", IMAGE), setting("TRAINER_IMAGE", f"{IMAGE}:{TAG}")
SITE_PACKAGES = setting("SITE_PACKAGES")
"""A folder of the nodes with torch in it, for a trainer image without."""
BUCKET = setting("BUCKET", "e2e")
STORAGE = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP")


def chart() -> list[Object]:
    """What the chart makes for an operator in, and of, the tests' namespace alone."""
    settings = [f"watchNamespaces={{{NAMESPACE}}}", f"image.repository={IMAGE}", f"agentImage.repository={AGENT_IMAGE}"]
    texts = [f"image.tag={TAG}", f"agentImage.tag={TAG}"]
    options = [*(f"--set={each}" for each in settings), *(f"--set-string={each}" for each in texts)]
    command = [str(binaries.helm(lambda _: None)), "template", "concertina", str(ROOT / "charts/concertina")]
    done = subprocess.run([*command, "--namespace", NAMESPACE, *options], capture_output=True, text=True, check=True)
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def prerequisites() -> str:
    """What an administrator applies once: CRD, namespace, and the right to read nodes, which has no namespace."""
    crd = (ROOT / "crds/concertina.dev_trainingjobs.yaml").read_text()
    wide = [each for each in chart() if each["kind"] in CLUSTER_WIDE]
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    return crd + "\n---\n" + yaml.safe_dump_all([namespace, *wide])


def job() -> Object:
    """Three small replicas, one a node, that train until they are deleted."""
    trainer = {
        "steps": 1_000_000,
        "model": {"layers": 1, "dim": 32, "heads": 2, "vocabSize": 256, "sequenceLength": 64},
        "data": {"uri": f"s3://{BUCKET}/data"},
        "globalBatchSize": 12,
        "logEverySteps": 1,
    }
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"e2e": JOB}},
    }
    container: Object = {
        "name": "trainer",
        "image": TRAINER_IMAGE,
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "1536Mi"}},
    }
    pod: Object = {
        "containers": [container],
        "topologySpreadConstraints": [spread],
        "terminationGracePeriodSeconds": 20,
    }
    if SITE_PACKAGES:
        container["env"] = [{"name": "PYTHONPATH", "value": "/site"}]
        container["volumeMounts"] = [{"name": "site", "mountPath": "/site", "readOnly": True}]
        pod["volumes"] = [{"name": "site", "hostPath": {"path": SITE_PACKAGES, "type": "Directory"}}]
    return {
        "apiVersion": "concertina.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": JOB},
        "spec": {
            "replicas": 3,
            "elastic": {"minReplicas": 2, "growAfterSeconds": 1},
            "failurePolicy": {"maxRestarts": 100},
            "template": {"metadata": {"labels": {"e2e": JOB}}, "spec": pod},
            "trainer": trainer,
            "checkpoint": {
                "uri": f"s3://{BUCKET}/{JOB}-{os.getpid()}",
                "everySeconds": 5,
                "keep": 2,
                "secretName": "s3",
            },
        },
    }


@dataclass
class Cluster:
    """The cluster of a kubeconfig, as the tests' namespace is seen."""

    kubeconfig: str
    kubectl_path: str = field(default_factory=lambda: str(binaries.control_plane(lambda _: None)["kubectl"]))

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        command = [self.kubectl_path, f"--kubeconfig={self.kubeconfig}", "-n", NAMESPACE, *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0 or not check, f"kubectl {' '.join(arguments)}: {done.stderr.strip()}"
        return done.stdout if done.returncode == 0 else ""

    def job(self) -> Object:
        found: Object = json.loads(self.kubectl("get", "tj", JOB, "-o", "json"))
        return found

    def status(self) -> Object:
        return dict(self.job().get("status", {}))

    def until(self, what: str, look: Callable[[Object], Any]) -> Object:
        """The job's status as soon as `look` finds it right."""
        give_up = time.monotonic() + GIVE_UP
        while not look(status := self.status()):
            assert time.monotonic() < give_up, f"{what} did not come: {json.dumps(status, indent=1)}"
            time.sleep(0.3)
        return status

    def training(self, replicas: int, above: int = -1) -> Object:
        """The status once so many replicas train in a round above that number."""

        def right(status: Object) -> bool:
            world = status.get("world", {})
            return reason(status) == "Training" and world["replicas"] == replicas and world["round"] > above

        return self.until(f"a world of {replicas} above round {above}", right)

    def apply(self, *objects: Object) -> None:
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))


def reason(status: Object) -> str:
    """The word in the column Status."""
    return str(next((each["reason"] for each in status.get("conditions", ()) if each["type"] == "Ready"), ""))


if __name__ == "__main__":
    sys.stdout.write(prerequisites())
