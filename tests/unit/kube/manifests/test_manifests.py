"""Manifests that the operator makes, compared with golden/manifests.json.

An intended change is made in that file by hand.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from builders.manifests import job
from concertina.kube.manifests.agent_container import PodSettings
from concertina.kube.manifests.pod import pod_manifest, rendezvous_manifest, secret_manifest
from concertina.kube.parse.views import job_view
from concertina.kube.resources import Raw
from concertina.plan.actions import CreatePod, CreateRendezvous, Rendezvous
from concertina.plan.observed import JobView
from concertina.plan.state import snapshot_memory

GOLDEN = Path(__file__).parent / "golden" / "manifests.json"
TRAINER: Raw = {
    "name": "trainer",
    "image": "i",
    "imagePullPolicy": "Always",
    "command": ["python"],
    "args": ["train.py", "--lr", "1"],
    "env": [
        {"name": "CONCERTINA_PYTHON", "value": "/opt/python"},
        {"name": "PYTHONPATH", "value": "/site"},
        {"name": "PET_MAX_RESTARTS", "value": "7"},
        {"name": "PET_RDZV_CONF", "value": "timeout=5"},
    ],
    "envFrom": [{"configMapRef": {"name": "settings"}}],
    "ports": [{"name": "metrics", "containerPort": 9000}],
    "volumeMounts": [{"name": "site", "mountPath": "/site"}],
    "securityContext": {"runAsUser": 1000, "privileged": True},
    "resources": {
        "requests": {"cpu": "1", "memory": "2Gi", "nvidia.com/gpu": 8},
        "limits": {"memory": "4Gi", "nvidia.com/gpu": 8},
    },
}
NODES: Raw = {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}
RICH: Raw = {
    "metadata": {
        "labels": {"team": "a"},
        "annotations": {"note": "b", "config.linkerd.io/skip-inbound-ports": "1"},
    },
    "spec": {
        "containers": [{"name": "side", "image": "s"}, TRAINER],
        "initContainers": [{"name": "first", "image": "f"}],
        "volumes": [{"name": "site", "emptyDir": {}}],
        "hostNetwork": True,
        "serviceAccountName": "trainers",
        "terminationGracePeriodSeconds": 45,
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [NODES]}},
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []},
        },
    },
}
PLAIN: Raw = {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["x"]}]}}
OWN_SHARED_MEMORY: Raw = {
    "spec": {
        "containers": [{**PLAIN["spec"]["containers"][0], "volumeMounts": [{"name": "m", "mountPath": "/dev/shm"}]}],
        "volumes": [{"name": "m", "emptyDir": {}}],
        "restartPolicy": "Never",
        "topologySpreadConstraints": [],
    }
}
BUNDLED: Raw = {"spec": {"containers": [{"name": "trainer", "image": "i", "resources": {"limits": {"memory": "4Gi"}}}]}}
STORED: Raw = {"checkpoint": {"uri": "s3://bucket/run", "secretName": "s3"}}
CREATES = {
    "first": CreatePod(0, 0),
    "placed": CreatePod(1, 2, avoid_nodes=("a", "b"), never_nodes=("c", "d")),
    "standby": CreatePod(3, 0, avoid_nodes=("a",), standby=True),
}


def view(spec: Raw) -> JobView:
    observed_view = job_view(job(spec, "demo"))
    assert observed_view.spec is not None, observed_view.spec_error
    return observed_view


def pod(spec: Raw, create: CreatePod) -> Raw:
    observed_view = view(spec)
    assert observed_view.spec is not None
    create = replace(create, snapshot_memory=snapshot_memory.room(observed_view.spec))
    return pod_manifest(observed_view, observed_view.spec, create, PodSettings("registry/agent:1"))


def rendezvous(spec: Raw) -> Raw:
    observed_view = view(spec)
    assert observed_view.spec is not None
    return rendezvous_manifest(observed_view, observed_view.spec, CreateRendezvous(3))


def manifests() -> Raw:
    specs: Raw = {
        "rich": {"template": RICH, **STORED},
        "plain": {"template": PLAIN},
        "own shared memory": {"template": OWN_SHARED_MEMORY},
        "bundled": {"template": BUNDLED, "trainer": {"steps": 10, "data": {"uri": "/$data"}}, **STORED},
    }
    made: Raw = {f"{spec}, {how}": pod(specs[spec], CREATES[how]) for spec in specs for how in CREATES}
    member = CreatePod(1, 2, rendezvous=Rendezvous("10.0.0.1:29400", round=3, least=4))
    for name in ("rich", "plain", "own shared memory"):
        spec = {"launcher": "Torchrun", "replicas": 4, **specs[name]}
        made[f"torchrun, {name}"] = pod(spec, member)
        made[f"rendezvous, {name}"] = rendezvous(spec)
    made["torchrun, elastic"] = pod(
        {"launcher": "Torchrun", "replicas": 4, "elastic": {"minReplicas": 2}, "template": PLAIN},
        CreatePod(1, 2, rendezvous=Rendezvous("10.0.0.1:29400", round=3, least=2)),
    )
    made["secret"] = secret_manifest(view(specs["plain"]), {"ca.crt": "Y2E="})
    return made


def test_manifests_are_as_they_were() -> None:
    made = manifests()
    for each in made.values():  # Other tests cover the trainer's configuration.
        for container in each.get("spec", {}).get("containers", ()):
            for entry in container.get("env", ()):
                if entry["name"] in ("CONCERTINA_TRAINER", "CONCERTINA_CHECKPOINT"):
                    entry["value"] = "left out"
    golden = json.loads(GOLDEN.read_text())
    assert made.keys() == golden.keys()
    for name, manifest in made.items():
        assert json.loads(json.dumps(manifest)) == golden[name], name
