"""What a pass leaves to be written beside the passes: a job recovers while the API server is slow to take its pods, or
refuses them (decision "Pods are written beside the passes"). `WriteQueue` says when: all jobs together have SLOTS of
these writes under way, in turns, and one job at most its window. `ObjectWriter` does one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from concertina import metrics
from concertina.agents.authority import Authority
from concertina.api.pod_names import pod_name, rendezvous_name
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.controller.cache.job import CachedJob
from concertina.controller.master_keys import MasterKeys
from concertina.controller.status_patches import PreconditionFailed
from concertina.kube.client import Client
from concertina.kube.errors import AlreadyExists, Conflict, Forbidden, Invalid, NamespaceEnds, NotFound, WebhookFailed
from concertina.kube.manifests.agent_container import PodSettings
from concertina.kube.manifests.pod import END_POD, pod_manifest, rendezvous_manifest, secret_manifest
from concertina.kube.parse.refusals import refusal
from concertina.kube.resources import PODS, SECRETS, TRAINING_JOBS, Raw
from concertina.plan.actions import Action, CreatePod, CreateRendezvous, CreateSecret, DeleteJob, DeletePod, EndPod
from concertina.plan.observed import JobView, Refusal
from concertina.turns import FairLimiter
from concertina_protocol.log import log_event

SLOTS, A_TURN = 16, 16
"""A job's pods are written side by side, up to a turn of them: with one each a thousand jobs that start together would
all train at the end, and none before."""
SMALLEST, FIRST, LARGEST = 1, 16, 64
"""Creates of one job that are under way at most: after one was refused, at first, and in the end. It grows by one with
each that is taken, so a quota is not asked a thousand times (Kubernetes' Job controller starts slowly, too)."""
SECRET_SECONDS = 60.0
"""A job's Secret is made again (a 409 is fine) before pods are created later than this: the operator can't read it."""
metrics.begin_at_zero(metrics.CREATE_REJECTIONS, [kind.name.lower() for kind in Refusal])


@dataclass
class _Window:
    wanted: Mapping[Hashable, Action] = field(default_factory=dict)
    """By the last pass."""
    under_way: dict[Hashable, asyncio.Task[None]] = field(default_factory=dict)
    """Those that wait for their turn among them."""
    size: int = FIRST
    full: bool = False
    """Whether creates that the last pass wanted were left out."""


class WriteQueue:
    """`write` does one action and says whether it was taken; it may raise, which `failed` hears. `changed` is called
    after a create where the next one has waited for it. `may_act`: False while another operator may be the one that
    acts; then nothing is written, and a later pass plans it again."""

    def __init__(
        self,
        write: Callable[[CachedJob, Action], Awaitable[bool]],
        failed: Callable[[CachedJob, Action, Exception], Awaitable[None]],
        changed: Callable[[str], None],
        may_act: Callable[[], bool],
    ) -> None:
        self._write = write
        self._failed = failed
        self._changed = changed
        self._may_act = may_act
        self._turns = FairLimiter(SLOTS, A_TURN)
        self._windows: dict[str, _Window] = {}

    def start(self, job: CachedJob, actions: Iterable[Action]) -> None:
        """All that this pass wants written: begin what is not under way already, as far as the window goes; the rest
        is planned again by a later pass. What waits for its turn and is not wanted any more is not written (decision
        "What waits is written as it is wanted then"). What was planned before a create came to its end names that pod
        again: it is left out."""
        window = self._windows.setdefault(job.view.uid, _Window())
        window.wanted = {_identity(action): action for action in actions}
        there = {pod.name for pod in job.pods.values()}
        left, window.full = window.size - _creates(window), False
        for key, action in window.wanted.items():
            creates = isinstance(action, CreatePod | CreateRendezvous)
            if creates and left <= 0:
                window.full = True
                continue
            if key not in window.under_way and _name(job, action) not in there:
                window.under_way[key] = asyncio.create_task(self._do(job, window, key, action))
                left -= creates
        self._drop_idle(job.view.uid, window)

    def forget(self, uid: str) -> None:
        """The job is gone. What is under way for it comes to its own end, and what waits for its turn is left."""
        if window := self._windows.pop(uid, None):
            window.wanted = {}

    def close(self) -> None:
        for window in self._windows.values():
            for task in window.under_way.values():
                task.cancel()

    async def _do(self, job: CachedJob, window: _Window, key: Hashable, action: Action) -> None:
        creates = isinstance(action, CreatePod | CreateRendezvous)
        error: Exception | None = None
        taken: bool | None = None
        try:
            async with self._turns.turn(job.lane, job.view.uid):
                if not self._may_act():
                    self._changed(job.view.uid)
                elif key in window.wanted:
                    action = window.wanted[key]
                    taken = await self._write(job, action)
        except Exception as raised:
            error, taken = raised, False
        finally:
            del window.under_way[key]
        if creates:
            if taken is not None:
                window.size = min(window.size + 1, LARGEST) if taken else SMALLEST
            if window.full:
                self._changed(job.view.uid)
        if error is not None:
            await self._failed(job, action, error)
        self._drop_idle(job.view.uid, window)

    def _drop_idle(self, uid: str, window: _Window) -> None:
        """What is as at first need not be remembered."""
        if not window.under_way and window.size >= FIRST and self._windows.get(uid) is window:
            del self._windows[uid]


def _creates(window: _Window) -> int:
    return sum(isinstance(key, CreatePod | CreateRendezvous) for key in window.under_way)


def _name(job: CachedJob, action: Action) -> str:
    """Of the pod that it creates; empty where it creates none."""
    match action:
        case CreateRendezvous():
            return rendezvous_name(job.view.name, action.round)
        case CreatePod():
            return pod_name(job.view.name, action.index, action.attempt)
        case _:
            return ""


def _identity(action: Action) -> Hashable:
    """The same for two actions of which one is enough: a pod is made once, whatever nodes the later plan avoids."""
    if isinstance(action, CreatePod):
        return CreatePod(action.index, action.attempt)
    if isinstance(action, DeletePod):
        return DeletePod(action.name, action.uid, "", action.force)
    return action


@dataclass
class ObjectWriter:
    client: Client
    """Tries each write once: whoever plans tries again."""
    cache: ClusterCache
    pod_settings: PodSettings
    keys: MasterKeys
    assume: Callable[[Raw], None]
    """Takes a pod that a write of ours returned, so that nothing is planned on what came before it."""

    async def write(self, job: CachedJob, action: Action) -> bool:
        """False where the API server refused it for a reason that is kept in the cache."""
        match action:
            case CreateSecret():
                await self._create_secret(job)
            case CreatePod() | CreateRendezvous():
                return await self._create_pod(job, action)
            case DeletePod():
                await self._delete_pod(job, action)
            case EndPod():
                await self._end_pod(job, action)
            case DeleteJob():
                namespace, name, uid = job.view.namespace, job.view.name, job.view.uid
                await self.client.delete(TRAINING_JOBS, namespace, name, uid=uid, propagation="Background")
                log_event("job deleted", **job.named())
            case _:
                raise TypeError(f"the plan holds what nobody can do: {action!r}")
        return True

    async def _create_secret(self, job: CachedJob) -> None:
        async with job.secret:
            if job.secret_made_at is not None and time.monotonic() <= job.secret_made_at + SECRET_SECONDS:
                return
            key = self.keys.of(job.view.status.master_key)
            if key is None:
                raise TypeError("the Secret of a job whose master key is not known")
            data = await asyncio.to_thread(_identity_of_agents, key, job.view)
            try:
                await self.client.create(SECRETS, job.view.namespace, secret_manifest(job.view, data))
            except AlreadyExists:
                pass  # made by an earlier pass; its name has the job's uid in it, so it is this job's
            except (Conflict, Forbidden, Invalid, WebhookFailed) as error:
                self._refused(job, error, "Secret")
                job.secret_made_at = None
                raise PreconditionFailed(f"the Secret was refused: {error.message}") from error
            job.secret_made_at = time.monotonic()

    async def _create_pod(self, job: CachedJob, create: CreatePod | CreateRendezvous) -> bool:
        view = job.view
        if view.spec is None:
            raise PreconditionFailed("a pod of a job whose spec can't be read any more")
        if isinstance(create, CreateRendezvous):
            manifest = rendezvous_manifest(view, view.spec, create)
        else:
            if not create.rendezvous:
                await self._create_secret(job)
            manifest = pod_manifest(view, view.spec, create, self.pod_settings)
        name = manifest["metadata"]["name"]
        try:
            stored = await self.client.create(PODS, view.namespace, manifest, strict=True)
        except AlreadyExists:
            # By a pod of ours, where an answer was lost or our view is stale.
            try:
                stored = await self.client.get(PODS, view.namespace, name)
            except NotFound as error:
                raise PreconditionFailed(f"pod {name} was there and is gone") from error
            owners: Iterable[Raw] = stored["metadata"].get("ownerReferences") or ()
            if not any(owner["uid"] == view.uid for owner in owners):
                # Not deleted, as it may be anybody's (decision "Names that are taken are passed over").
                log_event("name taken", **job.named(), pod=name)
                self.cache.name_taken(view.uid, name)
                return True
        except (Conflict, Forbidden, Invalid, WebhookFailed) as error:
            self._refused(job, error, name)
            return False
        self.cache.created(view.uid)
        log_event("pod created", **job.named(), pod=name)
        self.assume(stored)
        return True

    def _refused(self, job: CachedJob, error: Conflict | Forbidden | Invalid | WebhookFailed, what: str) -> None:
        kind = refusal(error)
        metrics.CREATE_REJECTIONS.labels(kind.name.lower()).inc()
        ends = isinstance(error, NamespaceEnds)
        self.cache.create_refused(job.view.uid, kind, error.message, namespace_ends=ends)
        log_event("create refused", **job.named(), pod=what, kind=kind.name, message=error.message)

    async def _delete_pod(self, job: CachedJob, delete: DeletePod) -> None:
        grace = 0 if delete.force else None
        try:
            left = await self.client.delete(PODS, job.view.namespace, delete.name, uid=delete.uid, grace=grace)
        except Conflict:
            return  # another pod by now has the name
        log_event("pod deleted", **job.named(), pod=delete.name, reason=delete.reason, force=delete.force)
        if left is not None and not delete.force:
            self.assume(left)

    async def _end_pod(self, job: CachedJob, end: EndPod) -> None:
        """Not deleted, which would take its log along (decision "A failed job's pods are ended in place")."""
        patch: list[Raw] = [
            {"op": "test", "path": "/metadata/uid", "value": end.uid},
            *({"op": "add", "path": f"/spec/{field}", "value": value} for field, value in END_POD.items()),
        ]
        try:
            stored = await self.client.patch(PODS, job.view.namespace, end.name, patch)
        except (NotFound, Forbidden, Invalid) as error:  # one that does not end is deleted in the end
            log_event("end refused", **job.named(), pod=end.name, message=error.message)
            return
        log_event("pod ended", **job.named(), pod=end.name, reason=end.reason)
        self.assume(stored)


def _identity_of_agents(master_key: bytes, view: JobView) -> dict[str, str]:
    return Authority(master_key, view.uid, view.created).secret_data()
