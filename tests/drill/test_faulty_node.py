"""The drill `faulty-node`, in a cluster with a node to which the replica can move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from builders.cluster import drills
from concertina.demo.stage import Stage

NODES = 4
"""Number of nodes, which is one more than the job has replicas."""
HARDWARE = "tests/unit/plan/recovery/test_hardware.py"
LAW = f"{HARDWARE}::test_its_pod_is_replaced_once_and_its_node_avoided_without_a_failure_being_counted"


@pytest.mark.long(law=LAW)
def test_a_replica_leaves_a_node_with_a_condition_for_a_fault(
    drill: Callable[[str], Any], stage: Stage, job: str
) -> None:
    verdict = drill("faulty-node")
    assert verdict["passed"], verdict["reasons"]
    drills.each_second_is_in_one_class(stage.job(job))
