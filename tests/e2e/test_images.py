"""Unusual images on real kubelets: each runs, or is refused with a clear message. `tools/odd-images.sh` builds them.

No image has a Python older than 3.9: tests/cluster/operator/pods/test_pods.py covers that.
"""

from __future__ import annotations

from typing import Any

import pytest

from builders.cluster import e2e
from builders.cluster.e2e import Cluster, condition

pytestmark = [pytest.mark.usefixtures("operator"), pytest.mark.timeout(900)]
SAY = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


def image(name: str) -> str:
    name_of_image = e2e.setting(name)
    if not name_of_image:
        pytest.skip(f"set CONCERTINA_E2E_{name} to an image that tools/odd-images.sh has made the root of")
    return name_of_image


def complete(cluster: Cluster, name: str) -> None:
    cluster.until("success", lambda status: condition(status, "Complete")["status"] == "True", name)


def container(image: str, command: list[str], **fields: Any) -> dict[str, Any]:
    return {"name": "trainer", "image": image, "command": command, **fields}


def test_an_image_without_python_is_refused_in_a_sentence(cluster: Cluster) -> None:
    own = container(image("NO_PYTHON_IMAGE"), ["sh", "-c", "echo hello"])
    with cluster.running(e2e.own_job("no-python", {"containers": [own]})):
        status = cluster.until(
            "a refusal", lambda status: condition(status, "Stalled")["status"] == "True", "no-python"
        )
        stalled = condition(status, "Stalled")
        assert stalled["reason"] == "NoPython"
        assert "can't start python3" in stalled["message"]
        assert "CONCERTINA_PYTHON" in stalled["message"]


def test_a_bare_python_away_from_the_path_runs(cluster: Cluster) -> None:
    """The image has no shell, no /tmp and no users, like distroless images."""
    python = "/opt/python/bin/python3"
    env = [{"name": "CONCERTINA_PYTHON", "value": python}]
    own = container(image("BARE_PYTHON_IMAGE"), [python, "-c", SAY], env=env)
    with cluster.running(e2e.own_job("bare", {"containers": [own]})):
        complete(cluster, "bare")
        logs = "".join(cluster.kubectl("logs", pod["metadata"]["name"]) for pod in cluster.pods("bare"))
        assert "rank 0 of 2" in logs
        assert "rank 1 of 2" in logs


def test_the_bundled_trainer_on_a_read_only_root_as_nobody(cluster: Cluster, data: None) -> None:
    rights = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    user = {"runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532}
    template = e2e.pod(e2e.trainer(securityContext=rights), securityContext=user)
    with cluster.running(e2e.bundled_job("nobody", template, steps=30)):
        complete(cluster, "nobody")
        assert cluster.status("nobody")["lastCheckpoint"]["step"] == 30
