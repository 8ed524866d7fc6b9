"""Check of quota in the tests with Kueue: it detects quota that is used twice."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, cast

from builders.cluster.queues import Client, workload
from builders.cluster.quota_use import QuotaUse

Object = dict[str, Any]


def pod(uid: str, version: int, phase: str = "Running", job: str = "a") -> tuple[int, Object]:
    metadata = {"namespace": "n", "uid": uid, "labels": {"concertina.dev/job": job}, "resourceVersion": str(version)}
    spec = {"containers": [{"name": "trainer", "resources": {"requests": {"cpu": "1"}}}]}
    return version, {
        "type": "MODIFIED",
        "object": {"kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": phase}},
    }


def lent(name: str, version: int, count: int, admitted: int, job: str = "a") -> tuple[int, Object]:
    body = workload("n", name, "q", count)
    body["metadata"] |= {"uid": name, "ownerReferences": [{"name": job}]}
    assignments = [{"name": "main", "count": admitted}]
    body["status"] = {"admission": {"podSetAssignments": assignments}} if admitted else {}
    return version, {"type": "MODIFIED", "object": body}


def breaches(*events: tuple[int, Object], quota: int = 4) -> list[str]:
    use = QuotaUse(cast(Client, None))
    use.events = list(events)
    return use.breaches(["n"], Decimal(quota))


def test_pods_within_their_reservation() -> None:
    """The order of the versions counts, not the order in which two watches delivered them."""
    assert not breaches(pod("1", 12), pod("2", 13), lent("w", 11, 2, 2))


def test_a_pod_without_a_reservation() -> None:
    assert "requests 1, and 0 is reserved" in breaches(pod("1", 10), lent("w", 11, 2, 2))[0].replace(
        "request 1", "requests 1"
    )


def test_a_count_that_is_patched_while_its_pods_live() -> None:
    assert breaches(lent("w", 1, 2, 2), pod("1", 2), pod("2", 3), lent("w", 4, 1, 2), pod("2", 5, "Succeeded"))
    assert not breaches(lent("w", 1, 2, 2), pod("1", 2), pod("2", 3), pod("2", 4, "Succeeded"), lent("w", 5, 1, 2))


def test_pods_of_an_inactive_workload() -> None:
    version, event = lent("w", 3, 2, 2)
    event["object"]["spec"]["active"] = False
    assert breaches(lent("w", 1, 2, 2), pod("1", 2), (version, event))
    assert not breaches(lent("w", 1, 2, 2), (version, event), lent("other", 4, 4, 4, job="b"))


def test_a_slice_and_the_workload_that_it_replaces_count_once() -> None:
    assert not breaches(lent("w", 1, 2, 2), lent("slice", 2, 4, 4))
    assert "the quota is 4" in breaches(lent("w", 1, 2, 2), lent("other", 2, 4, 4, job="b"))[0]
