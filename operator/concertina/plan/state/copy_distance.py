"""What a failure may take together with the copies of its snapshots: where members are, and how far apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from concertina.api.world import Distance
from concertina.plan.actions import Event
from concertina.plan.facts.context import JobContext
from concertina.plan.state import placement
from concertina.plan.state.placement import Place

_ADVICE = "spread the replicas with topologySpreadConstraints in spec.template to keep them apart"
_OF_BLOCKS = "ranks of a block stay together, so keep checkpoints frequent"


def places(ctx: JobContext, replicas: Iterable[str]) -> dict[str, Place]:
    """To a script that saves no snapshots all places are the same."""
    if not ctx.keeps_state:
        return dict.fromkeys(replicas, Place(""))
    pods = (ctx.replicas.pods[name] for name in replicas)
    return {pod.name: Place(pod.node, ctx.node(pod).zone) for pod in pods}


def distance(ctx: JobContext, members: Sequence[str], places: Mapping[str, Place]) -> Distance:
    """How far each of them is from its copy, at least."""
    if not ctx.keeps_state:
        return Distance.NO_SNAPSHOTS
    if len(members) < 2:
        return Distance.NONE
    in_zone, on_node = placement.shared(members, places)
    return Distance.SAME_NODE if on_node else Distance.NODE if in_zone else Distance.ZONE


def events(ctx: JobContext, members: Sequence[str], places: Mapping[str, Place], found: Distance) -> tuple[Event, ...]:
    """Where copies have come closer than they might be: once, not in every round."""
    zones = {place.zone for place in places.values() if place.zone}
    if (
        found == ctx.world.copies
        or found not in (Distance.NODE, Distance.SAME_NODE)
        or (found is Distance.NODE and len(zones) < 2)
    ):
        return ()
    in_zone, on_node = placement.shared(members, places)
    count, what = (on_node, "node") if found is Distance.SAME_NODE else (in_zone, "zone")
    advice = _OF_BLOCKS if ctx.spec.group_sizes else _ADVICE
    message = (
        f"{count} of {len(members)} replicas have the copy of their snapshots within the same {what}: "
        f"when that is lost, training goes back to the last checkpoint; {advice}"
    )
    return (Event("Warning" if found is Distance.SAME_NODE else "Normal", f"CopiesShare{what.capitalize()}", message),)
