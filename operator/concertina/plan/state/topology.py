"""Network topology of a job: choice of members and ranks by domain, and search for groups that span several domains.

A snapshot is a copy of the training state in node memory. A failure of a node or zone can destroy both a member and the
copy of its snapshots. This module therefore also computes the distance between a member and that copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from concertina.api.spec import JobSpec, Parallelism
from concertina.api.world import Distance
from concertina.plan.actions import Event
from concertina.plan.facts import sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.state import member_placement
from concertina.plan.state.member_placement import MemberPlace
from concertina.plan.state.rank_order import Blocks, Path, choose, common, order

HOSTNAME = "kubernetes.io/hostname"
ANY = ("topology.kubernetes.io/zone", HOSTNAME)
"""Node labels whose values are the network domains of a job without `spec.topology`."""


def chosen(ctx: JobContext, names: Sequence[str]) -> tuple[str, ...]:
    """Return the members of the next round from replicas that can all reach each other; empty if there are too few.

    `names` lists members of the last round first. If there are too many names, the last ones are left out. For a job
    with parallel groups, replicas of incomplete blocks are left out before others.
    """
    size = sizes.fitting(len(names), ctx.spec)
    if not ctx.spec.group_sizes or not size:
        return tuple(names[:size])
    return choose(names, size, _blocks(ctx, names), tuple(ctx.round.members))


def ranked(ctx: JobContext, names: Sequence[str]) -> tuple[str, ...]:
    """Return the members of a round with parallel groups, in order of rank."""
    return order(names, _blocks(ctx, names), tuple(ctx.round.members))


def layout(spec: JobSpec, ranks: int) -> str | None:
    """Return the parallel layout of `ranks` ranks as text, such as "shard 4 x tensor 2".

    The result is None if the spec sets no parallelism.
    """
    degrees = spec.parallelism
    if degrees.block == 1 and degrees.shard is None:
        return None
    data = ranks // degrees.group
    # A custom command decides by itself how to use the ranks beyond its groups.
    outer = {"shard" if spec.bundled else "data": data}
    if degrees.shard is not None:
        outer = {"replicate": data // degrees.shard, "shard": degrees.shard}
    inner = {"pipeline": degrees.pipeline, "context": degrees.context, "tensor": degrees.tensor}
    factors = [f"{name} {degree}" for name, degree in {**outer, **inner}.items() if degree > 1]
    experts = f", experts over {degrees.expert}" if degrees.expert > 1 else ""
    return (" x ".join(factors) or "one rank") + experts


def crossing(ctx: JobContext, members: Mapping[str, int]) -> str | None:
    """Return a sentence about groups that span several domains of `spec.topology`; None if no group does.

    Only groups that communicate in every layer count. `members` maps each member, in order of rank, to its number of
    workers.
    """
    topology = ctx.spec.topology
    if topology is None:
        return None
    domains = _domains(ctx, members)
    path_of = [domains[name] for name, workers in members.items() for _ in range(workers)]
    sentences: list[str] = []
    for kind, groups in groups_of(ctx.spec.parallelism, len(path_of)):
        split = Counter(len(common(path_of[rank] for rank in group)) for group in groups)
        sentences += [
            f"{split[level]} of {len(groups)} {kind} groups cross {label}"
            for level, label in enumerate(topology.labels)
            if split[level]
        ]
    return "; ".join(sentences) or None


def groups_of(degrees: Parallelism, ranks: int) -> Iterator[tuple[str, Sequence[Sequence[int]]]]:
    """Yield the groups of ranks that communicate in every layer, with the name of their kind."""
    sequence = degrees.context * degrees.tensor
    if degrees.tensor > 1:
        yield "tensor", [range(start, start + degrees.tensor) for start in range(0, ranks, degrees.tensor)]
    if degrees.context > 1:
        yield "context", [range(start, start + sequence) for start in range(0, ranks, sequence)]
    if degrees.expert > 1:
        # As in the trainer's mesh: neighbours in `shard`, of one pipeline stage.
        within, span = degrees.expert // degrees.expert_shards, degrees.expert_shards * degrees.group
        yield (
            "expert",
            [
                [start + inner for start in range(first, begin + span, degrees.group) for inner in range(within)]
                for begin in range(0, ranks, span)
                for first in range(begin, begin + degrees.group, within)
            ],
        )


def _blocks(ctx: JobContext, names: Collection[str]) -> Blocks:
    return Blocks(ctx.spec.group_sizes, _domains(ctx, names))


def _domains(ctx: JobContext, names: Iterable[str]) -> dict[str, Path]:
    """Return the network domains of each replica, keyed by replica.

    Nodes without a label share one domain. For the hostname label, each node is a domain of its own.
    """
    labels: tuple[str, ...] = ctx.spec.topology.labels if ctx.spec.topology else ANY
    domains: dict[str, Path] = {}
    for name in names:
        pod = ctx.replicas.pods[name]
        node_labels = ctx.node(pod).labels
        domains[name] = tuple(node_labels.get(label, pod.node if label == HOSTNAME else "") for label in labels)
    return domains


# --- distance between members and the copies of their snapshots

_SPREAD_ADVICE = "spread the replicas with topologySpreadConstraints in spec.template to keep them apart"
_BLOCKS_ADVICE = "the ranks of a block stay together, so write checkpoints often"


def places(ctx: JobContext, replicas: Iterable[str]) -> dict[str, MemberPlace]:
    """Return the node and zone of each replica, keyed by replica.

    If the job saves no snapshots, the order of the members does not matter, and all replicas get the same place.
    """
    if not ctx.keeps_state:
        return dict.fromkeys(replicas, MemberPlace(""))
    pods = (ctx.replicas.pods[name] for name in replicas)
    return {pod.name: MemberPlace(pod.node, ctx.node(pod).zone) for pod in pods}


def copy_distance(ctx: JobContext, members: Sequence[str], places: Mapping[str, MemberPlace]) -> Distance:
    """Return the smallest distance between a member and the member that holds the copy of its snapshots."""
    if not ctx.keeps_state:
        return Distance.NO_SNAPSHOTS
    if len(members) < 2:
        return Distance.NONE
    in_zone, on_node = member_placement.shared(members, places)
    return Distance.SAME_NODE if on_node else Distance.NODE if in_zone else Distance.ZONE


def copy_events(
    ctx: JobContext, members: Sequence[str], places: Mapping[str, MemberPlace], copies: Distance
) -> tuple[Event, ...]:
    """Return an event if another arrangement of the members would put copies of snapshots further from their originals.

    The event is a warning: a single failure can destroy a member and the copy of its snapshots. There is no event if
    the last round had the same distance.
    """
    zones = {place.zone for place in places.values() if place.zone}
    if (
        copies == ctx.world.copies
        or copies not in (Distance.NODE, Distance.SAME_NODE)
        or (copies is Distance.NODE and len(zones) < 2)
    ):
        return ()
    in_zone, on_node = member_placement.shared(members, places)
    count, unit = (on_node, "node") if copies is Distance.SAME_NODE else (in_zone, "zone")
    advice = _BLOCKS_ADVICE if ctx.spec.group_sizes else _SPREAD_ADVICE
    message = (
        f"{count} of {len(members)} replicas have the copy of their snapshots in the same {unit}: if it is lost, "
        f"training goes back to the last checkpoint; {advice}"
    )
    return (Event("Warning" if copies is Distance.SAME_NODE else "Normal", f"CopiesShare{unit.capitalize()}", message),)
