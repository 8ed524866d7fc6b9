"""Read and replace the trainer container in a pod's manifest. All functions are pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from concertina.api import TRAINER
from concertina.api.quantity_fields import amounts_of, bytes_of
from concertina.api.spec import JobSpec
from concertina.kube.resources import Raw

PYTHON = "CONCERTINA_PYTHON"
"""Environment variable of the trainer container with the path of the Python for the agent.

By default, the agent uses the python3 on the PATH.
"""


def trainer_of(pod: Raw) -> Raw:
    """Return the container named `trainer` of a pod or of a pod template."""
    trainer: Raw = next(container for container in pod["spec"]["containers"] if container["name"] == TRAINER)
    return trainer


def with_trainer(pod: Raw, trainer: Raw, **spec: Any) -> Raw:
    """Return the pod's manifest with its container `trainer` replaced, and with `spec` added to the pod's spec."""
    containers = [trainer if container["name"] == TRAINER else container for container in pod["spec"]["containers"]]
    return {**pod, "spec": {**pod["spec"], "containers": containers, **spec}}


def environment(container: Raw, values: Mapping[str, str], fields: Mapping[str, str]) -> list[Raw]:
    """Return the container's environment variables, with additional variables that override variables of the same name.

    Args:
        container: Container with its own variables.
        values: Values of additional variables, keyed by name.
        fields: Pod field paths (such as `status.podIP`) that provide the values of additional variables, keyed by name.
    """
    added = [
        *({"name": name, "value": value} for name, value in values.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
    ]
    remaining = (variable for variable in container.get("env") or () if variable["name"] not in {*values, *fields})
    return [*added, *remaining]


def storage_access(container: Raw, spec: JobSpec) -> Raw:
    """Return the container's `envFrom`, with the Secrets for storage and for the experiment tracker added.

    The result is empty if the container has no `envFrom` and the job has no such Secrets.
    """
    sources = list(container.get("envFrom") or ())
    if spec.checkpoint and spec.checkpoint.secret_name:
        sources.append({"secretRef": {"name": spec.checkpoint.secret_name}})
    if spec.tracking and spec.tracking.secret_name:
        sources.append({"secretRef": {"name": spec.tracking.secret_name}})
    return {"envFrom": sources} if sources else {}


def python(container: Raw) -> str:
    """Return the command that starts the container's Python, with which the agent runs.

    The command is `python3`, unless the container's environment variable CONCERTINA_PYTHON contains another path.
    """
    paths = (entry.get("value") for entry in container.get("env") or () if entry["name"] == PYTHON)
    return next(paths, None) or "python3"


def memory_of(container: Raw) -> int:
    """Return the container's memory limit in bytes; 0 if there is no limit."""
    return bytes_of(amounts_of(container, "limits").get("memory"))
