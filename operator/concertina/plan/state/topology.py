"""The layout of a world in blocks: where its replicas are, who is of it, in which order, and what crosses a domain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from concertina.api.spec import JobSpec
from concertina.plan.facts import sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.state.rank_order import Blocks, Path, choose, common, order

HOSTNAME = "kubernetes.io/hostname"
ANY = ("topology.kubernetes.io/zone", HOSTNAME)
"""The domains of a job that names none."""


def chosen(ctx: JobContext, names: Sequence[str]) -> tuple[str, ...]:
    """Those of the round to come, of these that are mutually reachable, old members first; none where they are too
    few. Where someone must go, joiners go before members, later before earlier; in a world of blocks those first whose
    block is broken anyway."""
    size = sizes.fitting(len(names), ctx.spec)
    if not ctx.spec.group_sizes or not size:
        return tuple(names[:size])
    return choose(names, size, _blocks(ctx, names), tuple(ctx.round.members))


def ranked(ctx: JobContext, names: Sequence[str]) -> tuple[str, ...]:
    """Members of a world in blocks, in order of rank."""
    return order(names, _blocks(ctx, names), tuple(ctx.round.members))


def layout(spec: JobSpec, ranks: int) -> str | None:
    """The degrees of a world of so many ranks, in a line; None where its spec says nothing of parallelism."""
    degrees = spec.parallelism
    if degrees.block == 1 and degrees.shard is None:
        return None
    data = ranks // degrees.group
    # What a command of one's own does with the ranks beside its groups is its own affair.
    outer = {"shard" if spec.bundled else "data": data}
    if degrees.shard is not None:
        outer = {"replicate": data // degrees.shard, "shard": degrees.shard}
    inner = {"pipeline": degrees.pipeline, "context": degrees.context, "tensor": degrees.tensor}
    said = [f"{name} {degree}" for name, degree in {**outer, **inner}.items() if degree > 1]
    return " x ".join(said) or "one rank"


def crossing(ctx: JobContext, members: Mapping[str, int]) -> str | None:
    """Which tensor and context groups go over a link between domains that spec.topology names, in a sentence; None
    where none does. `members` in order of rank, with the workers of each."""
    topology, degrees = ctx.spec.topology, ctx.spec.parallelism
    if topology is None:
        return None
    domains = _domains(ctx, members)
    path_of = [domains[name] for name, workers in members.items() for _ in range(workers)]
    found: list[str] = []
    for kind, size in (("tensor", degrees.tensor), ("context", degrees.context * degrees.tensor)):
        if (kind == "context" and degrees.context == 1) or size == 1:
            continue
        groups = [path_of[at : at + size] for at in range(0, len(path_of), size)]
        split = Counter(len(common(group)) for group in groups)
        found += [
            f"{split[level]} of {len(groups)} {kind} groups cross {label}"
            for level, label in enumerate(topology.labels)
            if split[level]
        ]
    return "; ".join(found) or None


def _blocks(ctx: JobContext, names: Collection[str]) -> Blocks:
    return Blocks(ctx.spec.group_sizes, _domains(ctx, names))


def _domains(ctx: JobContext, names: Iterable[str]) -> dict[str, Path]:
    """Without a label a node is in one domain with all that lack it; but each is a host."""
    labels: tuple[str, ...] = ctx.spec.topology.labels if ctx.spec.topology else ANY
    found: dict[str, Path] = {}
    for name in names:
        pod = ctx.replicas.pods[name]
        known = ctx.node(pod).labels
        found[name] = tuple(known.get(label, pod.node if label == HOSTNAME else "") for label in labels)
    return found
