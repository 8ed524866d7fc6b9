"""Manifests of pods as the operator makes them from a TrainingJob, for tests without an API server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from concertina.kube.manifests.agent_container import PodSettings
from concertina.kube.manifests.pod import pod_manifest
from concertina.kube.parse.views import job_view
from concertina.kube.resources import Raw
from concertina.plan.actions import CreatePod
from concertina.plan.state import snapshot_memory

UID = "0f1e2d3c-aaaa-bbbb-cccc-000000000000"


SECOND = CreatePod(index=1, attempt=2)
SETTINGS = PodSettings("registry/agent:1")


def job(spec: dict[str, Any], name: str = "j") -> Raw:
    metadata = {
        "name": name,
        "namespace": "n",
        "uid": UID,
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return {"metadata": metadata, "spec": spec}


def made(manifest: Raw, create: CreatePod = SECOND, settings: PodSettings = SETTINGS) -> Raw:
    view = job_view(manifest)
    assert view.spec is not None, view.spec_error
    create = replace(create, snapshot_memory=snapshot_memory.room(view.spec))
    return pod_manifest(view, view.spec, create, settings)


def container(pod: Raw, name: str = "trainer") -> Raw:
    return next(c for c in pod["spec"]["containers"] if c["name"] == name)


def environment(pod: Raw) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container(pod)["env"]}
