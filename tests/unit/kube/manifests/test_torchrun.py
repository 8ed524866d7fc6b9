"""Pods of `launcher: Torchrun`."""

from __future__ import annotations

from typing import Any

from builders.manifests import container, environment, job
from concertina.kube.manifests.pod import rendezvous_manifest
from concertina.kube.parse.views import job_view
from concertina.plan.actions import CreateRendezvous


def rendezvous(trainer: dict[str, Any], **pod: Any) -> dict[str, Any]:
    own = {"name": "trainer", "image": "mine", "command": ["torchrun", "train.py"], **trainer}
    view = job_view(job({"replicas": 2, "launcher": "Torchrun", "template": {"spec": {"containers": [own], **pod}}}))
    assert view.spec is not None, view.spec_error
    return rendezvous_manifest(view, view.spec, CreateRendezvous(3))


def test_the_store_finds_torch_where_the_members_do() -> None:
    """torch may be in a volume that variables of the template name.

    The store's pod takes no other variable of the template.
    """
    env = [{"name": "PYTHONPATH", "value": "/site"}, {"name": "NCCL_DEBUG", "value": "INFO"}]
    mount = {"name": "site", "mountPath": "/site", "readOnly": True}
    volume = {"name": "site", "hostPath": {"path": "/opt/site"}}
    made = rendezvous({"env": env, "volumeMounts": [mount]}, volumes=[volume])
    assert environment(made)["PYTHONPATH"] == "/site"
    assert "NCCL_DEBUG" not in environment(made)
    assert container(made)["volumeMounts"][0] == mount
    assert made["spec"]["volumes"] == [volume, {"name": "concertina", "emptyDir": {}}]


def test_the_store_takes_no_gpu_and_does_not_start_again() -> None:
    made = rendezvous({"resources": {"limits": {"nvidia.com/gpu": 8}}}, hostNetwork=True)
    assert "nvidia.com/gpu" not in container(made)["resources"]["limits"]
    assert made["spec"]["restartPolicy"] == "Never"
    assert "hostNetwork" not in made["spec"]
