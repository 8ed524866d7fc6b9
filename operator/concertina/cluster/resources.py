"""The kinds of objects that concertina reads and writes, and where the API server serves them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

Raw = dict[str, Any]
"""An object as the API server sends it."""


@dataclass(frozen=True)
class Resource:
    api: str
    """api/v1 or apis/GROUP/VERSION."""
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """Path of one object, or of the collection without a `name`; of all namespaces without a `namespace`."""
        scope = f"namespaces/{namespace}/" if self.namespaced and namespace else ""
        return "/".join(part for part in (f"/{self.api}/{scope}{self.plural}", name, subresource) if part)


PODS = Resource("api/v1", "pods")
SECRETS = Resource("api/v1", "secrets")
EVENTS = Resource("api/v1", "events")
NODES = Resource("api/v1", "nodes", namespaced=False)
NAMESPACES = Resource("api/v1", "namespaces", namespaced=False)
DEPLOYMENTS = Resource("apis/apps/v1", "deployments")
JOBS = Resource("apis/batch/v1", "jobs")
LEASES = Resource("apis/coordination.k8s.io/v1", "leases")
TRAINING_JOBS = Resource("apis/concertina.dev/v1alpha1", "trainingjobs")


def version_of(obj: Raw) -> int:
    """The resourceVersion as a number: Kubernetes 1.35 and later promise that they compare as integers."""
    return int(obj.get("metadata", {}).get("resourceVersion") or 0)


_UNITS = {"m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


def bytes_of(quantity: object) -> int:
    """A quantity as Kubernetes writes it (500M, 1.5Gi, 1e9), rounded down; 0 for none, or for what is not one."""
    match = _QUANTITY.fullmatch(str(quantity or ""))
    if match is None:
        return 0
    number, unit = Decimal(match[1]), match[2]
    return int(number * 2 ** _BINARY[unit] if unit in _BINARY else number.scaleb(_UNITS[unit]))


_QUANTITY = re.compile(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d{1,2})?)(|m|[kMGTPE]|[KMGTPE]i)")
