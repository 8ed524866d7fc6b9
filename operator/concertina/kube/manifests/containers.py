"""Container of the trainer in the manifest of a pod, as the layers of `pod` read and replace it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from concertina.api import TRAINER
from concertina.api.quantity_fields import amounts_of, bytes_of
from concertina.api.spec import JobSpec
from concertina.kube.resources import Raw

PYTHON = "CONCERTINA_PYTHON"
"""Variable of the template's container with the Python that runs the agent, when it is not python3 on the PATH."""


def trainer_of(pod: Raw) -> Raw:
    """Return the container `trainer` of a pod or of a pod's template."""
    trainer: Raw = next(container for container in pod["spec"]["containers"] if container["name"] == TRAINER)
    return trainer


def with_trainer(pod: Raw, trainer: Raw, **spec: Any) -> Raw:
    """Return the same pod with that container in place of its trainer, and with those fields in its spec."""
    containers = [trainer if container["name"] == TRAINER else container for container in pod["spec"]["containers"]]
    return {**pod, "spec": {**pod["spec"], "containers": containers, **spec}}


def environment(container: Raw, values: Mapping[str, str], fields: Mapping[str, str]) -> list[Raw]:
    """Return the container's variables with additional ones, which take precedence.

    Args:
        values: Values by name.
        fields: Paths of fields of the pod, by the variable's name.
    """
    added = [
        *({"name": name, "value": value} for name, value in values.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
    ]
    remaining = (variable for variable in container.get("env") or () if variable["name"] not in {*values, *fields})
    return [*added, *remaining]


def storage_access(container: Raw, spec: JobSpec) -> Raw:
    """Return the field `envFrom` with the Secrets of storage and of the tracker, or nothing when it would be empty."""
    sources = list(container.get("envFrom") or ())
    if spec.checkpoint and spec.checkpoint.secret_name:
        sources.append({"secretRef": {"name": spec.checkpoint.secret_name}})
    if spec.tracking and spec.tracking.secret_name:
        sources.append({"secretRef": {"name": spec.tracking.secret_name}})
    return {"envFrom": sources} if sources else {}


def python(container: Raw) -> str:
    """Return the command that starts Python in the container. Images without a shell may have it anywhere."""
    paths = (entry.get("value") for entry in container.get("env") or () if entry["name"] == PYTHON)
    return next(paths, None) or "python3"


def memory_of(container: Raw) -> int:
    """Return the memory limit of the container in bytes, or 0 without a limit."""
    return bytes_of(amounts_of(container, "limits").get("memory"))
