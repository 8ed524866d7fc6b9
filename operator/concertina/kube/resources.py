"""The kinds of objects that concertina reads and writes, and where the API server serves them."""

from __future__ import annotations

from dataclasses import dataclass
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
JOBS = Resource("apis/batch/v1", "jobs")
LEASES = Resource("apis/coordination.k8s.io/v1", "leases")
NETWORK_POLICIES = Resource("apis/networking.k8s.io/v1", "networkpolicies")
WEBHOOKS = Resource("apis/admissionregistration.k8s.io/v1", "validatingwebhookconfigurations", namespaced=False)
TOKEN_REVIEWS = Resource("apis/authentication.k8s.io/v1", "tokenreviews", namespaced=False)
SERVER_VERSION = Resource("", "version", namespaced=False)
ACCESS_REVIEWS = Resource("apis/authorization.k8s.io/v1", "subjectaccessreviews", namespaced=False)
TRAINING_JOBS = Resource("apis/concertina.dev/v1beta1", "trainingjobs")


def version_of(obj: Raw) -> int:
    """The resourceVersion as a number: Kubernetes 1.35 and later promise that they compare as integers."""
    return int(obj.get("metadata", {}).get("resourceVersion") or 0)
