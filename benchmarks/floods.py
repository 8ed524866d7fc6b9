"""Detection of floods by agents of other tenants, from the operator's log."""

from __future__ import annotations

from concertina.demo.stage import SYSTEM, Stage
from concertina.drill.faults import tenants


def held_back(stage: Stage, namespace: str) -> bool:
    """Return whether the current operator reports that it throttles the agents of that namespace."""
    log = stage.cluster.kubectl("-n", SYSTEM, "logs", "deployment/concertina", "--tail=-1")
    return any(tenants.HELD_BACK in line and f'"{namespace}"' in line for line in log.splitlines())
