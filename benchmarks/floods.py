"""Detection, in the operator's log, of agents of other tenants that flood the operator."""

from __future__ import annotations

from concertina.demo.stage import SYSTEM, Stage
from concertina.drill.faults import tenants


def held_back(stage: Stage, namespace: str) -> bool:
    """Return whether the current operator reports that it limits the agents of the namespace."""
    log = stage.cluster.kubectl("-n", SYSTEM, "logs", "deployment/concertina", "--tail=-1")
    return any(tenants.HELD_BACK in line and f'"{namespace}"' in line for line in log.splitlines())
