"""Gang scheduling: choose the gang mechanism of a job, and build its pod group.

With a gang mechanism, the job's scheduler decides which pods get nodes, and when. The operator chooses the mechanism
while the job has no pods. It keeps the mechanism until all pods are gone, because all pods of a group need the same
scheduler (decision "Gang scheduling follows the template's scheduler").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from concertina.amounts import amount
from concertina.api.spec import Gang, JobSpec, TopologyMode
from concertina.api.status import GangMark, JobStatus
from concertina.plan.facts import sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.observed import GangApi, JobView, PodGroup, PodView


@dataclass(frozen=True)
class _Mechanism:
    alternatives: tuple[tuple[GangApi, ...], ...]
    """Alternative sets of APIs, the preferred set first. The API server must serve all APIs of one set.

    The first API of a set is the API of the pod groups.
    """
    remedy: str


MECHANISMS: Mapping[Gang, _Mechanism] = {
    Gang.POD_GROUP: _Mechanism(
        ((GangApi.POD_GROUP,), (GangApi.POD_GROUP_ALPHA,)),
        "enable the feature gate GenericWorkload and that API in the cluster",
    ),
    Gang.VOLCANO: _Mechanism(((GangApi.VOLCANO,),), "install Volcano"),
    Gang.COSCHEDULING: _Mechanism(((GangApi.COSCHEDULING,),), "install the coscheduling plugin and its CRD"),
    Gang.KAI: _Mechanism(
        ((GangApi.KAI, GangApi.KARTA),), "install KAI and the CRD of Karta, and set kai.enabled in the chart"
    ),
}
MUTABLE = frozenset({GangApi.POD_GROUP, GangApi.VOLCANO, GangApi.COSCHEDULING})
"""APIs with pod groups whose minimum number of pods can be changed."""
BY_SCHEDULER: Mapping[str, Gang] = {
    "default-scheduler": Gang.POD_GROUP,
    "volcano": Gang.VOLCANO,
    "kai-scheduler": Gang.KAI,
}
"""Gang mechanism that `gang: Auto` chooses for each scheduler name of the pod template."""
AUTO_NEVER = frozenset({GangApi.POD_GROUP_ALPHA})
"""APIs that `gang: Auto` never chooses.

The API server may serve an alpha API while the feature gate of the scheduler is off.
"""


def mark(ctx: JobContext) -> GangMark | None:
    """Return the new value of `status.gang`: the gang mechanism that was chosen for the job, and its pod group.

    The result is None if the job requests no gang mechanism, and while the operator does not know which APIs the API
    server serves.
    """
    if ctx.spec.scheduling.gang is None:
        return None
    last = ctx.status.gang
    if last is not None and (_has_pods(ctx) or ctx.observed.gang_apis is None):
        return _with_minimum(ctx, last)
    if ctx.observed.gang_apis is None:
        return None
    return _chosen(ctx, ctx.observed.gang_apis)


def _has_pods(ctx: JobContext) -> bool:
    return any(not pod.ended for pod in ctx.observed.pods)


def _with_minimum(ctx: JobContext, last: GangMark) -> GangMark:
    """Return `status.gang` with the job's present minimum of pods.

    Some gang APIs do not allow a change of a pod group's minimum. With such an API, `status.gang` is returned
    unchanged.
    """
    needed_count = sizes.least(ctx.spec)
    if last.min_count == needed_count or _api(last) not in MUTABLE:
        return last
    return last.model_copy(update={"min_count": needed_count})


def _chosen(ctx: JobContext, served: frozenset[GangApi]) -> GangMark | None:
    asked = ctx.spec.scheduling.gang
    mechanism = BY_SCHEDULER.get(scheduler_of(ctx.spec)) if asked is Gang.AUTO else asked
    if asked is Gang.AUTO:
        served -= AUTO_NEVER
    apis = _served(mechanism, served)
    if mechanism is None or not apis:
        return GangMark(message=_why_none(ctx.spec)) if asked is Gang.AUTO else None
    api, has_object = apis[0], mechanism is not Gang.KAI
    why = f"the scheduler is {scheduler_of(ctx.spec)}, and the API server serves {api}" if asked is Gang.AUTO else ""
    return GangMark(
        mechanism=mechanism,
        api_version=api if has_object else "",
        pod_group=group_name(ctx.observed.job, api, sizes.least(ctx.spec)) if has_object else "",
        min_count=sizes.least(ctx.spec),
        message=why and f"spec.scheduling.gang is Auto: {why}",
    )


def _served(mechanism: Gang | None, served: frozenset[GangApi]) -> tuple[GangApi, ...]:
    """Return the APIs to use for a gang mechanism; empty if the API server does not serve the APIs that are needed.

    A mechanism has alternative sets of APIs. The result is the first set whose APIs are all in `served`.
    """
    alternatives = MECHANISMS[mechanism].alternatives if mechanism else ()
    return next((apis for apis in alternatives if served.issuperset(apis)), ())


def _why_none(spec: JobSpec) -> str:
    scheduler = scheduler_of(spec)
    if scheduler not in BY_SCHEDULER:
        known = ", ".join(BY_SCHEDULER)
        return (
            f"spec.scheduling.gang is Auto, and scheduler {scheduler} is not one of {known}: pods are "
            "scheduled one by one"
        )
    wanted = " with ".join(MECHANISMS[BY_SCHEDULER[scheduler]].alternatives[0])
    return (
        f"spec.scheduling.gang is Auto, the scheduler is {scheduler}, and the API server does not serve "
        f"{wanted}: pods are scheduled one by one"
    )


def scheduler_of(spec: JobSpec) -> str:
    """Return the scheduler name of the pod template."""
    fields = spec.template.spec.model_extra or {}
    name = fields.get("schedulerName")
    return name if isinstance(name, str) and name else "default-scheduler"


def group_name(job: JobView, api: GangApi, min_count: int) -> str:
    """Return the name of the job's pod group.

    The name contains a part of the job's uid, so that a job never joins the group of an earlier job with the same name.
    It also contains `min_count` if the API does not allow a change of a group's minimum.
    """
    name = f"{job.name}-{job.uid[:8]}"
    return name if api in MUTABLE else f"{name}-{min_count}"


def not_served(ctx: JobContext) -> str:
    """Return why the gang mechanism in the spec can't be used.

    The result is empty if the mechanism can be used, or if the operator does not know yet which APIs are served.
    """
    asked, served = ctx.spec.scheduling.gang, ctx.observed.gang_apis
    mechanism = MECHANISMS.get(asked) if asked else None
    if mechanism is None or served is None or _served(asked, served):
        return ""
    wanted = " or ".join(" with ".join(apis) for apis in mechanism.alternatives)
    return (
        f"spec.scheduling.gang is {asked}, and the API server does not serve {wanted}: {mechanism.remedy}, or set gang "
        "to Auto"
    )


# --- the pod group


def pod_group(ctx: JobContext) -> PodGroup | None:
    """Return the pod group that the job's pods join; None if the scheduler places each pod on its own."""
    chosen = mark(ctx)
    if chosen is None or not chosen.mechanism:
        return None
    topology = ctx.spec.scheduling.topology
    required = topology is not None and topology.mode is TopologyMode.REQUIRED
    return PodGroup(
        api=_api(chosen) or GangApi.KAI,
        name=chosen.pod_group,
        min_count=chosen.min_count,
        queue=ctx.spec.scheduling.queue or "",
        topology=topology.key if topology is not None and required else "",
    )


def _api(chosen: GangMark) -> GangApi | None:
    return GangApi(chosen.api_version) if chosen.api_version in frozenset(GangApi) else None


def scheduled_together(status: JobStatus, pods: Iterable[PodView]) -> bool:
    """Return whether a gang mechanism schedules the given live pods of a job."""
    chosen = status.gang
    if chosen is None or not chosen.mechanism:
        return False
    return chosen.mechanism != Gang.POD_GROUP or not ignored_groups(status, pods)


def ignored_groups(status: JobStatus, pods: Iterable[PodView]) -> tuple[str, ...]:
    """Return the replicas whose pods have no reference to the pod group because the API server dropped it.

    The API server drops this field from new pods while its feature gate is off.
    """
    chosen = status.gang
    if chosen is None or chosen.mechanism != Gang.POD_GROUP:
        return ()
    return tuple(
        pod.name for pod in pods if pod.index is not None and not pod.ended and not pod.scheduling_group
    )  # fmt: skip


def shortage(ctx: JobContext, pod: PodView) -> str:
    """Return why no scheduler tries to place a pod of a pod group; empty if the group has enough pods.

    A gang scheduler waits until the group has its minimum of pods. Kubernetes itself reports nothing about a pod that
    waits for this: neither a condition nor an event.
    """
    chosen = ctx.status.gang
    if chosen is None or not pod.scheduling_group:
        return ""
    count = sum(other.scheduling_group == pod.scheduling_group and not other.ended for other in ctx.observed.pods)
    if count >= chosen.min_count:
        return ""
    return (
        f"its pod group {pod.scheduling_group} is scheduled once it has {amount(chosen.min_count, 'pod')}, and "
        f"it has {count}"
    )
