"""Every scenario of `concertina drill` on a cluster with real kubelets."""

from __future__ import annotations

import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from builders.cluster import drills, e2e
from builders.cluster.e2e import Cluster
from concertina.drill.faults.by_command import PREFIX
from concertina.drill.scenarios import SCENARIOS

pytestmark = pytest.mark.timeout(900)
OUTSIDE = frozenset({"hostile-agent", "long-queue"})
"""Scenarios that create namespaces: these tests have only one, and so does their operator."""
PLAYED = [
    name for name, scenario in SCENARIOS.items() if not isinstance(scenario.elsewhere, str) and name not in OUTSIDE
]


@pytest.mark.parametrize("scenario", PLAYED)
def test_the_drill_passes(drill: Callable[[str], Any], scenario: str) -> None:
    verdict = drill(scenario)
    assert verdict["passed"], verdict["reasons"]


def part_by_policy() -> subprocess.CompletedProcess[str]:
    """Run the drill `operator-partition` without a command for it, which then uses a NetworkPolicy."""
    none = {PREFIX + name: "" for name in e2e.ACTIONS}
    return drills.drill("operator-partition", "--yes", "-o", "json", "-n", e2e.NAMESPACE, **none)


def test_network_policies_that_nobody_enforces_are_noticed(cluster: Cluster, job: str) -> None:
    done = part_by_policy()
    assert cluster.kubectl("get", "networkpolicies", "-o", "name") == ""
    if done.returncode == 0:
        pytest.skip("this cluster enforces NetworkPolicies")
    assert "does not enforce NetworkPolicies" in done.stderr
    assert PREFIX + "OPERATOR_CUT" in done.stderr


@contextmanager
def enforced(cluster: Cluster) -> Iterator[None]:
    """Enforce NetworkPolicies within the block: while one exists, a packet filter cuts the operator off."""
    commands = e2e.operator_commands()
    if not commands:
        pytest.skip("set CONCERTINA_E2E_NODE_RUN (docs/drills.md)")
    pod, node = cluster.operator_pod()
    over, cut = threading.Event(), False

    def act(name: str) -> None:
        words = commands[PREFIX + name].replace("{operator_node}", node).replace("{operator}", pod)
        subprocess.run(shlex.split(words), check=True, timeout=60)

    def follow() -> None:
        nonlocal cut
        while not over.wait(0.5):
            there = bool(cluster.kubectl("get", "networkpolicies", "-o", "name"))
            if there != cut:
                act("OPERATOR_CUT" if there else "OPERATOR_REJOIN")
            cut = there

    network = threading.Thread(target=follow)
    network.start()
    try:
        yield
    finally:
        over.set()
        network.join()
        if cut:
            act("OPERATOR_REJOIN")


def test_an_operator_that_is_parted_by_a_network_policy(
    cluster: Cluster, job: str, request: pytest.FixtureRequest
) -> None:
    with enforced(cluster):
        verdict = drills.verdict(part_by_policy(), request.config)
    assert verdict["passed"], verdict["reasons"]
    assert "NetworkPolicy" in verdict["done"]
