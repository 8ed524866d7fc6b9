"""The trainer's container in the manifest of a pod, as the layers of `pod` read and replace it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from concertina.api import TRAINER
from concertina.api.quantity_fields import amounts_of, bytes_of
from concertina.api.spec import JobSpec
from concertina.kube.resources import Raw

PYTHON = "CONCERTINA_PYTHON"
"""A variable of the template's container: the Python that runs the agent, where that is not python3 on the PATH."""


def trainer_of(pod: Raw) -> Raw:
    """The container `trainer` of a pod or of a pod's template."""
    found: Raw = next(each for each in pod["spec"]["containers"] if each["name"] == TRAINER)
    return found


def with_trainer(pod: Raw, trainer: Raw, **spec: Any) -> Raw:
    """The same pod with that container in the place of its trainer, and with those fields in its spec."""
    containers = [trainer if each["name"] == TRAINER else each for each in pod["spec"]["containers"]]
    return {**pod, "spec": {**pod["spec"], "containers": containers, **spec}}


def environment(container: Raw, values: Mapping[str, str], fields: Mapping[str, str]) -> list[Raw]:
    """The container's variables with ours, which win: texts, and fields of the pod by their paths."""
    ours = [
        *({"name": name, "value": value} for name, value in values.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
    ]
    theirs = (each for each in container.get("env") or () if each["name"] not in {*values, *fields})
    return [*ours, *theirs]


def storage_access(container: Raw, spec: JobSpec) -> Raw:
    """The field `envFrom`, with the Secrets of storage and of the tracker; empty where nothing would be in it."""
    sources = list(container.get("envFrom") or ())
    if spec.checkpoint and spec.checkpoint.secret_name:
        sources.append({"secretRef": {"name": spec.checkpoint.secret_name}})
    if spec.tracking and spec.tracking.secret_name:
        sources.append({"secretRef": {"name": spec.tracking.secret_name}})
    return {"envFrom": sources} if sources else {}


def python(container: Raw) -> str:
    """What starts Python in the container: images without a shell may have it anywhere."""
    named = (entry.get("value") for entry in container.get("env") or () if entry["name"] == PYTHON)
    return next(named, None) or "python3"


def memory_of(container: Raw) -> int:
    """Bytes that the container may use; 0 where nothing bounds it."""
    return bytes_of(amounts_of(container, "limits").get("memory"))
