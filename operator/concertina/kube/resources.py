"""Kinds of Kubernetes objects that concertina reads and writes, with their API paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Raw = dict[str, Any]
"""A Kubernetes object as a dict, as the API server sends it."""


@dataclass(frozen=True)
class Resource:
    """Kind of Kubernetes objects, with its API path."""

    api: str
    """Path of the API version: api/v1 or apis/GROUP/VERSION."""
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """Return the API path of one object, or of the list of all objects if `name` is empty.

        Without `namespace`, the list covers all namespaces.
        """
        scope = f"namespaces/{namespace}/" if self.namespaced and namespace else ""
        return "/".join(part for part in (f"/{self.api}/{scope}{self.plural}", name, subresource) if part)


PODS = Resource("api/v1", "pods")
SECRETS = Resource("api/v1", "secrets")
EVENTS = Resource("api/v1", "events")
NODES = Resource("api/v1", "nodes", namespaced=False)
NAMESPACES = Resource("api/v1", "namespaces", namespaced=False)
JOBS = Resource("apis/batch/v1", "jobs")
POD_TEMPLATES = Resource("api/v1", "podtemplates")
LEASES = Resource("apis/coordination.k8s.io/v1", "leases")
NETWORK_POLICIES = Resource("apis/networking.k8s.io/v1", "networkpolicies")
WEBHOOKS = Resource("apis/admissionregistration.k8s.io/v1", "validatingwebhookconfigurations", namespaced=False)
TOKEN_REVIEWS = Resource("apis/authentication.k8s.io/v1", "tokenreviews", namespaced=False)
SERVER_VERSION = Resource("", "version", namespaced=False)
ACCESS_REVIEWS = Resource("apis/authorization.k8s.io/v1", "subjectaccessreviews", namespaced=False)
KUEUE_API = "apis/kueue.x-k8s.io/v1beta2"
KUEUE = Resource("apis/kueue.x-k8s.io", "v1beta2", namespaced=False)
"""API path of Kueue's discovery document, which exists only if Kueue is installed."""
WORKLOADS = Resource(KUEUE_API, "workloads")
RESOURCE_FLAVORS = Resource(KUEUE_API, "resourceflavors", namespaced=False)
WORKLOAD_PRIORITY_CLASSES = Resource(KUEUE_API, "workloadpriorityclasses", namespaced=False)
PRIORITY_CLASSES = Resource("apis/scheduling.k8s.io/v1", "priorityclasses", namespaced=False)
RESOURCE_CLAIMS = Resource("apis/resource.k8s.io/v1", "resourceclaims")
RESOURCE_CLAIM_TEMPLATES = Resource("apis/resource.k8s.io/v1", "resourceclaimtemplates")
API_DISCOVERY = Resource("", "apis", namespaced=False)
TRAINING_JOBS = Resource("apis/concertina.dev/v1beta1", "trainingjobs")


def version_of(obj: Raw) -> int:
    """Return the object's resourceVersion as a number.

    Kubernetes 1.35 and later guarantee that resourceVersions can be compared as integers.
    """
    return int(obj.get("metadata", {}).get("resourceVersion") or 0)
