"""Reasons why jobs can't start that room of other jobs would not remove."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from builders import jobs
from concertina.plan.lifecycle.admission import hindrance
from concertina.plan.observed import BlockedBy, NodeView, PodView

GPUS = {"pods": Decimal(1), "cpu": Decimal("1.5"), "gpu": Decimal(2)}


def node(name: str = "a", ready: bool = True, cordoned: bool = False, **allocatable: int) -> NodeView:
    return NodeView(
        name, ready, cordoned=cordoned, allocatable={name: Decimal(amount) for name, amount in allocatable.items()}
    )


def pod(**fields: Any) -> PodView:
    return jobs.pod(0, **{"node": "", "phase": "Pending", "requests": GPUS, **fields})


WHOLE = {"pods": 9, "cpu": 9, "gpu": 4}


@pytest.mark.parametrize(
    ("nodes", "holds"),
    [
        ([node(**WHOLE)], 2),
        ([node(**WHOLE), node("b", **WHOLE)], 4),
        ([node(**{**WHOLE, "cpu": 2})], 1),
        ([node(**{**WHOLE, "pods": 1})], 1),
        ([node(**{**WHOLE, "gpu": 1})], 0),
        ([node(**WHOLE), node("b", pods=9, cpu=9)], 2),
        ([node(**WHOLE), node("b", ready=False, **WHOLE)], 2),
        ([node(**WHOLE), node("b", cordoned=True, **WHOLE)], 2),
    ],
    ids=[
        "two by two GPUs",
        "two nodes",
        "the scarcest counts",
        "few pods",
        "half of what one needs",
        "one without GPUs",
        "one is not ready",
        "one is cordoned",
    ],
)
def test_how_many_pods_the_nodes_could_hold(nodes: list[NodeView], holds: int) -> None:
    named = {node.name: node for node in nodes}
    assert hindrance(holds, [pod()], named, None) is None
    assert hindrance(holds + 1, [pod()], named, None) is BlockedBy.TOO_LARGE


def test_nodes_that_are_not_watched_exclude_nothing() -> None:
    assert hindrance(1, [pod()], None, None) is None


def test_no_nodes_hold_nothing() -> None:
    assert hindrance(1, [pod()], {}, None) is BlockedBy.TOO_LARGE


def test_nodes_that_take_no_pods_count_for_who_has_one_there() -> None:
    nodes = {"a": node(**WHOLE), "b": node("b", cordoned=True, **WHOLE), "c": node("c", ready=False, **WHOLE)}
    held = [pod(node="b", phase="Running"), pod(node="c", phase="Running"), pod()]
    assert hindrance(6, held, nodes, None) is None
    assert hindrance(7, held, nodes, None) is BlockedBy.TOO_LARGE


@pytest.mark.parametrize(
    ("pods", "nodes"),
    [
        ([], [node(pods=0)]),
        ([pod(requests={})], [node(pods=0)]),
        ([pod()], [node()]),
        ([pod()], [node(pods=99, cpu=999), node("b", pods=99, cpu=999)]),
    ],
    ids=["no pods", "requests that are not known", "a node that does not say", "a resource that no node names"],
)
def test_what_is_not_known_hinders_nobody(pods: list[PodView], nodes: list[NodeView]) -> None:
    assert hindrance(99, pods, {node.name: node for node in nodes}, None) is None


@pytest.mark.parametrize(
    ("pods", "excluded"),
    [
        ([pod(excluded=True)], True),
        ([pod(node="a", phase="Running"), pod(), pod(excluded=True)], True),
        ([pod(excluded=True, avoids=("b",))], False),
        ([pod(excluded=True, deleting=True), pod()], False),
        ([pod(excluded=True, phase="Failed"), pod()], False),
    ],
)
def test_what_excludes_one_pod_excludes_all_that_are_alike(pods: list[PodView], excluded: bool) -> None:
    found = hindrance(1, pods, {"a": node(**WHOLE)}, None)
    assert found is (BlockedBy.EXCLUDED if excluded else None)


def test_a_quota() -> None:
    nodes = {"a": node(**WHOLE)}
    assert hindrance(2, [pod()], nodes, 2) is BlockedBy.QUOTA
    assert hindrance(2, [pod()], nodes, 1) is BlockedBy.BEYOND_QUOTA
    assert hindrance(2, [], {}, 1) is BlockedBy.BEYOND_QUOTA
