"""CustomResourceDefinitions of a test's cluster."""

from __future__ import annotations

from builders.cluster.queues import Client
from builders.until import until


def wait_established(client: Client) -> None:
    """Wait until the API server serves all CRDs. `kubectl wait` fails at a CRD that has no conditions yet."""

    def are_established() -> bool:
        definitions = client.call("GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions")["items"]
        conditions = [definition.get("status", {}).get("conditions") or () for definition in definitions]
        return all(any((c["type"], c["status"]) == ("Established", "True") for c in of_crd) for of_crd in conditions)

    until(are_established, "the CRDs to be served")
