"""Messages of the scheduler and of quotas: whether more room would help."""

from __future__ import annotations

from decimal import Decimal

import pytest

from concertina.kube.parse.room import amounts, excluded, fits_quota

NOT_HELPFUL = "preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
NO_VICTIMS = "preemption: 0/3 nodes are available: 3 No preemption victims found for incoming pod."
MIXED = (
    "preemption: 0/3 nodes are available: 1 No preemption victims found for incoming pod, "
    "2 Preemption is not helpful for scheduling."
)
SELECTOR = "node(s) didn't match Pod's node affinity/selector"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (f"0/3 nodes are available: 3 {SELECTOR}. {NOT_HELPFUL}", True),
        (f"0/3 nodes are available: 3 {SELECTOR}. no new claims to deallocate, {NOT_HELPFUL}", True),
        (f"0/3 nodes are available: 3 {SELECTOR}. preemption: not eligible due to preemptionPolicy=Never.", True),
        (f"0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 {SELECTOR}. {NOT_HELPFUL}", True),
        (
            "0/3 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/unreachable: }, "
            f"1 node(s) had untolerated taint {{a: b}}, 1 node(s) were unschedulable. {NOT_HELPFUL}",
            True,
        ),
        (f"0/3 nodes are available: 3 node(s) didn't satisfy plugin(s) [NodeAffinity]. {NOT_HELPFUL}", True),
        (f"0/3 nodes are available: 3 Insufficient nvidia.com/gpu. {NOT_HELPFUL}", True),
        (f"0/3 nodes are available: 2 {SELECTOR}, 1 Insufficient nvidia.com/gpu. {NOT_HELPFUL}", True),
        (f"0/3 nodes are available: 3 Insufficient nvidia.com/gpu. {NO_VICTIMS}", False),
        (f"0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 {SELECTOR}. {MIXED}", False),
        (
            f"0/3 nodes are available: 1 Insufficient cpu, 2 {SELECTOR}. "
            "preemption: not eligible due to preemptionPolicy=Never.",
            False,
        ),
        (f"0/3 nodes are available: 1 Too many pods, 2 {SELECTOR}. {MIXED}", False),
        (f"0/3 nodes are available: 3 node(s) didn't have free ports for the requested pod ports. {NO_VICTIMS}", False),
        (f"0/3 nodes are available: 3 node(s) didn't match pod anti-affinity rules. {NO_VICTIMS}", False),
        # The scheduler also says of devices that another pod has claimed that preemption would not help.
        (f"0/3 nodes are available: 3 cannot allocate all claims. {NOT_HELPFUL}", False),
        (f"0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. {NOT_HELPFUL}", False),
        ("0/3 nodes are available: 3 node(s) didn't satisfy plugin(s) [NodeAffinity VolumeBinding]. x", False),
        ("0/3 nodes are available", False),
        ("no nodes available to schedule pods", False),
        ("", False),
    ],
)
def test_what_excludes_a_pod_from_every_node_whoever_leaves(message: str, expected: bool) -> None:
    assert excluded(message) is expected


def refusal(requested: str, used: str, limited: str) -> str:
    return (
        f'pods "a-0-0" is forbidden: exceeded quota: few.gpus, requested: {requested}, used: {used}, limited: {limited}'
    )


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (refusal("pods=1", "pods=3", "pods=3"), 3),
        (refusal("pods=1", "pods=0", "pods=0"), 0),
        (refusal("requests.cpu=500m", "requests.cpu=1800m", "requests.cpu=2"), 4),
        (
            refusal(
                "requests.memory=3Gi,requests.nvidia.com/gpu=1",
                "requests.memory=0,requests.nvidia.com/gpu=9",
                "requests.memory=10Gi,requests.nvidia.com/gpu=9",
            ),
            3,
        ),
        (refusal("cpu=0", "cpu=0", "cpu=1"), None),
        (refusal("cpu=many", "cpu=0", "cpu=1"), None),
        (refusal("cpu=1", "cpu=0", "memory=1"), None),
        (refusal("cpu", "cpu", "cpu"), None),
        (
            'secrets "a" is forbidden: exceeded quota: q, requested: secrets=1, used: secrets=5, limited: secrets=1',
            None,
        ),
        ('pods "a-0-0" is forbidden: failed quota: q: must specify limits.cpu for: trainer', None),
        ("", None),
    ],
)
def test_how_many_pods_a_quota_allows(message: str, expected: int | None) -> None:
    assert fits_quota(message) == expected


def test_equal_quantities_are_parsed_once() -> None:
    first = amounts({"cpu": "1500m", "memory": "1Ki", "pods": 110})
    assert first == {"cpu": Decimal("1.5"), "memory": 1024, "pods": 110}
    assert amounts({"cpu": "1500m", "memory": "1Ki", "pods": "110"}) is first
