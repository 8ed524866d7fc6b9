"""What keeps a job from starting that room of other jobs would not change. Where a check says so it is right; where
none does, room may be all that is missing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from decimal import Decimal

from concertina.plan.observed import Hindrance, NodeView, PodPhase, PodView


def hindrance(
    least: int, pods: Collection[PodView], nodes: Mapping[str, NodeView] | None, fits_quota: int | None
) -> Hindrance | None:
    """Return the hindrance of a job that waits for room and needs `least` pods; None where it has none. `fits_quota`:
    how many the quota that refused one allows. `nodes`: None where the operator does not watch them."""
    alive = [pod for pod in pods if not pod.deleting and pod.phase in (PodPhase.PENDING, PodPhase.RUNNING)]
    if _excluded(alive):
        return Hindrance.EXCLUDED
    if nodes is not None and not _could_hold(least, alive, nodes):
        return Hindrance.TOO_LARGE
    if fits_quota is None:
        return None
    return Hindrance.BEYOND_QUOTA if fits_quota < least else Hindrance.QUOTA


def _excluded(alive: Collection[PodView]) -> bool:
    """What excludes one pod excludes all that wait: they are alike but for nodes that one avoids by a rule of ours."""
    return any(pod.excluded and not pod.avoids for pod in alive)


def _could_hold(least: int, alive: Collection[PodView], nodes: Mapping[str, NodeView]) -> bool:
    """Whether so many fit on the nodes that take pods, and on those that have one of it already, if nothing else ran
    there. Never too strict: rules of where pods may run are left out, and a resource that no node names may come from
    elsewhere, as claimed devices do (decision "Nobody waits for what room would not help")."""
    requests = next((pod.requests for pod in alive if pod.requests), None)
    if requests is None:
        return True
    named = [
        name
        for name, amount in requests.items()
        if amount > 0 and any(name in node.allocatable for node in nodes.values())
    ]
    mine, room = {pod.node for pod in alive}, 0
    for node in nodes.values():
        if node.name in mine or (node.ready and not node.cordoned):
            offers = node.allocatable
            if not offers:
                return True  # it does not say what it has
            room += min((int(offers.get(name, Decimal(0)) // requests[name]) for name in named), default=least)
            if room >= least:
                return True
    return False
