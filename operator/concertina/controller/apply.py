"""Carries out what plan() decided, in the order that plan/types.py gives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from concertina.agents.authority import Authority
from concertina.agents.links import Links
from concertina.api.status import rfc3339
from concertina.controller.journal import decision
from concertina.controller.master_keys import MasterKeys
from concertina.controller.world import Job, World
from concertina.kube.client import Client
from concertina.kube.errors import (
    AlreadyExists,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    NamespaceEnds,
    NotFound,
    TestFailed,
)
from concertina.kube.manifests.agent import Images
from concertina.kube.manifests.pod import END_POD, pod_manifest, rendezvous_manifest, secret_manifest
from concertina.kube.parse.refusals import refusal
from concertina.kube.resources import PODS, SECRETS, TRAINING_JOBS, Raw
from concertina.kube.watch.events import Events
from concertina.plan.types import (
    Action,
    CreatePod,
    CreateRendezvous,
    CreateSecret,
    DeleteJob,
    DeletePod,
    EndPod,
    Event,
    JobView,
    Plan,
    Send,
)

SECRET_SECONDS = 60.0
"""A job's Secret is made again (a 409 is fine) before pods are created later than this: the operator can't read it."""


CLAIM_FIELDS = ("round", "claimId", "committed")
"""Of a claim; what makes it another one."""


class Outdated(Exception):
    """Something that was observed is no longer so: observe and plan again."""


@dataclass
class Applier:
    client: Client
    pods: Client
    """For what is written beside the passes: it tries once, and whoever plans tries again."""
    world: World
    links: Links
    events: Events
    images: Images
    keys: MasterKeys
    remember: Callable[[Raw], None]
    """Takes a pod that a write of ours returned."""
    lost: tuple[str, ...] = ()
    """Fields of the status that the API server was last seen to drop."""

    async def apply(self, job: Job, plan: Plan) -> tuple[Action, ...]:
        """What is left to be written beside the passes. Raises Outdated where the claim is not the one that was
        observed; then nothing else is done."""
        view = job.view
        await self._write_status(job, plan)
        self.links.keep(view.uid, {pod.name for pod in job.pods.values()} | plan.watch.keys())
        for action in plan.actions:
            if isinstance(action, Send):
                self._send(job, action)
        self.links.watch(view.uid, plan.watch)
        for event in plan.events:
            decision("event", job.name, type=event.type, reason=event.reason, message=event.message)
            self.events.post(view, event)
        return tuple(action for action in plan.actions if not isinstance(action, Send))

    async def _write_status(self, job: Job, plan: Plan) -> None:
        view, wanted = job.view, plan.status.manifest()
        if wanted == view.status.manifest() and job.status:
            return
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": view.uid},
            *claim_tests(job.status),
            {"op": "add", "path": "/status", "value": wanted},
        ]
        try:
            stored = await self.client.patch(TRAINING_JOBS, view.namespace, view.name, patch, subresource="status")
        except TestFailed as error:
            self.world.hear_job(await self.client.get(TRAINING_JOBS, view.namespace, view.name))
            raise Outdated("the claim is not the one that was observed") from error
        _tell_of_changes(job.name, view.status.manifest(), wanted)
        self._tell_of_losses(view, lost(wanted, stored.get("status") or {}))
        self.world.hear_job(stored)

    async def tell_failure(self, job: Job, error: Exception) -> None:
        """A condition, an event and a line of the log for a pass that raised; the conditions of the next one that does
        not take its place. Best effort: whatever made the pass fail must not keep this from being tried."""
        view = job.view
        message = f"{type(error).__name__}: {str(error)[:600] or 'no words'}"
        sentence = (
            f"the operator failed on this job and tries again, ever more rarely ({message}). Its pods are left as they "
            "are meanwhile. Report this with the operator's log, unless the words say what to do"
        )
        decision("reconcile error", job.name, message=message)
        conditions, news = failure_conditions(job.status, sentence, view.generation)
        if not news:
            return
        self.events.post(view, Event("Warning", "ReconcileError", sentence))
        status = job.status or None
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": view.uid},
            {"op": "add", "path": "/status/conditions", "value": conditions}
            if status
            else {"op": "add", "path": "/status", "value": {"conditions": conditions}},
        ]
        try:
            stored = await self.client.patch(TRAINING_JOBS, view.namespace, view.name, patch, subresource="status")
            self.world.hear_job(stored)
        except ApiError as refused:
            decision("reconcile error not told", job.name, message=refused.message)

    def _tell_of_losses(self, view: JobView, paths: tuple[str, ...]) -> None:
        """Once, on the job that it was seen on."""
        if paths and paths != self.lost:
            self.lost = paths
            message = (
                f"the API server does not keep {', '.join(paths[:10])}: its CustomResourceDefinition is older than "
                "this operator. Apply the crds/ of this version, which helm upgrade leaves as they are: "
                "kubectl apply --server-side --force-conflicts -f crds/"
            )
            decision("outdated crd", f"{view.namespace}/{view.name}", message=message)
            self.events.post(view, Event("Warning", "OutdatedCRD", message))

    async def write(self, job: Job, action: Action) -> bool:
        """One action of those that are left; False where the API server refused it for a reason that is kept."""
        if isinstance(action, CreateSecret):
            await self._create_secret(job)
        elif isinstance(action, CreatePod):
            return await self._create_pod(job, action)
        elif isinstance(action, CreateRendezvous):
            return await self._create_rendezvous(job, action)
        elif isinstance(action, DeletePod):
            await self._delete_pod(job, action)
        elif isinstance(action, EndPod):
            await self._end_pod(job, action)
        elif isinstance(action, DeleteJob):
            await self._delete_job(job.view)
        else:
            raise TypeError(f"the plan holds what nobody can do: {action!r}")
        return True

    def _send(self, job: Job, send: Send) -> None:
        if self.links.send(job.view.uid, send.replica, send.address, send.message):
            message = send.message
            kind = type(message).__name__
            decision(kind.lower(), job.name, replica=send.replica, round=message.round, claim=message.claim)

    async def _create_secret(self, job: Job) -> None:
        async with job.secret:
            if time.monotonic() > job.secret_made_at + SECRET_SECONDS or not job.secret_made_at:
                await self._store_secret(job)

    async def _store_secret(self, job: Job) -> None:
        view = job.view
        key = self.keys.of(view.status.master_key)
        if key is None:
            raise TypeError("the Secret of a job whose master key is not known")
        data = await asyncio.to_thread(_identity, key, view)
        try:
            await self.pods.create(SECRETS, view.namespace, secret_manifest(view, data))
        except AlreadyExists:
            pass  # made by an earlier pass; its name has the job's uid in it, so it is this job's
        except (Conflict, Forbidden, Invalid) as error:
            self._refused(job, error, "Secret")
            job.secret_made_at = 0.0
            raise Outdated(f"the Secret was refused: {error.message}") from error
        job.secret_made_at = time.monotonic()

    async def _create_pod(self, job: Job, create: CreatePod) -> bool:
        view = job.view
        if view.spec is None:
            raise Outdated("a pod of a job whose spec can't be read any more")
        if not create.rendezvous:
            await self._create_secret(job)
        return await self._store_pod(job, pod_manifest(view, view.spec, create, self.images))

    async def _create_rendezvous(self, job: Job, create: CreateRendezvous) -> bool:
        if job.view.spec is None:
            raise Outdated("a pod of a job whose spec can't be read any more")
        return await self._store_pod(job, rendezvous_manifest(job.view, job.view.spec, create))

    async def _store_pod(self, job: Job, manifest: Raw) -> bool:
        view, name = job.view, manifest["metadata"]["name"]
        try:
            stored = await self.pods.create(PODS, view.namespace, manifest, strict=True)
        except AlreadyExists:
            stored = await self._existing(view, name)
            owners: Iterable[Raw] = stored["metadata"].get("ownerReferences") or ()
            if not any(owner["uid"] == view.uid for owner in owners):
                decision("name taken", job.name, pod=name)
                self.world.name_taken(view.uid, name)
                return True
        except (Conflict, Forbidden, Invalid) as error:
            self._refused(job, error, name)
            return False
        self.world.created(view.uid)
        decision("pod created", job.name, pod=name)
        self.remember(stored)
        return True

    async def _existing(self, view: JobView, name: str) -> Raw:
        """The pod that has the name already: ours, where an answer was lost or our view is stale."""
        try:
            return await self.client.get(PODS, view.namespace, name)
        except NotFound as error:
            raise Outdated(f"pod {name} was there and is gone") from error

    def _refused(self, job: Job, error: Conflict | Forbidden | Invalid, what: str) -> None:
        kind = refusal(error)
        self.world.create_refused(job.view.uid, kind, error.message, ends=isinstance(error, NamespaceEnds))
        decision("create refused", job.name, pod=what, kind=kind.name, message=error.message)

    async def _delete_pod(self, job: Job, delete: DeletePod) -> None:
        grace = 0 if delete.force else None
        try:
            left = await self.pods.delete(PODS, job.view.namespace, delete.name, uid=delete.uid, grace=grace)
        except Conflict:
            return  # another pod by now has the name
        decision("pod deleted", job.name, pod=delete.name, reason=delete.reason, force=delete.force)
        if left is not None and not delete.force:
            self.remember(left)

    async def _end_pod(self, job: Job, end: EndPod) -> None:
        patch: list[Raw] = [
            {"op": "test", "path": "/metadata/uid", "value": end.uid},
            *({"op": "add", "path": f"/spec/{field}", "value": value} for field, value in END_POD.items()),
        ]
        try:
            stored = await self.pods.patch(PODS, job.view.namespace, end.name, patch)
        except (NotFound, Forbidden, Invalid) as error:  # one that does not end is deleted in the end
            decision("end refused", job.name, pod=end.name, message=error.message)
            return
        decision("pod ended", job.name, pod=end.name, reason=end.reason)
        self.remember(stored)

    async def _delete_job(self, view: JobView) -> None:
        await self.client.delete(TRAINING_JOBS, view.namespace, view.name, uid=view.uid, propagation="Background")
        decision("job deleted", f"{view.namespace}/{view.name}")


def failure_conditions(status: Raw, sentence: str, generation: int) -> tuple[list[Raw], bool]:
    """The conditions of a job whose pass raised: as they were, but for two; and whether that is news."""
    before = {condition["type"]: condition for condition in status.get("conditions") or ()}
    now = rfc3339(int(time.time()))
    news = False
    for kind in ("ReconcileError", "Stalled"):
        old = before.get(kind) or {}
        changed = old.get("status") != "True"
        news |= changed or old.get("message") != sentence
        before[kind] = {
            "type": kind,
            "status": "True",
            "reason": "ReconcileError",
            "message": sentence,
            "lastTransitionTime": now if changed else old["lastTransitionTime"],
            "observedGeneration": generation,
        }
    return list(before.values()), news


def lost(wanted: Raw, stored: Raw, path: str = "status") -> tuple[str, ...]:
    """Paths of fields that were written and are not there; of lists, of their first entry."""
    if wanted == stored:
        return ()
    found: list[str] = []
    for name, value in wanted.items():
        here = f"{path}.{name}"
        if name not in stored:
            found.append(here)
            continue
        kept = stored[name]
        if isinstance(value, list) and isinstance(kept, list) and value and kept:
            value, kept, here = value[0], kept[0], f"{here}[]"
        if isinstance(value, dict) and isinstance(kept, dict):
            found += lost(value, kept, here)
    return tuple(found)


def claim_tests(status: Raw) -> list[Raw]:
    """The part of a JSON patch that holds only while `status.world.claim` is the one in `status`.

    Its texts are left out: the API server compares strings as they are escaped, and Go's way is not Python's."""
    world = status.get("world")
    if world is None:
        return [{"op": "test", "path": "/status/world" if status else "/status", "value": None}]
    path, claim = "/status/world/claim", world.get("claim")
    if claim is None:
        return [{"op": "test", "path": path, "value": None}]
    return [{"op": "test", "path": f"{path}/{name}", "value": claim.get(name)} for name in CLAIM_FIELDS]


def _identity(master_key: bytes, view: JobView) -> dict[str, str]:
    return Authority(master_key, view.uid, view.created).secret_data()


def _tell_of_changes(job: str, before: Raw, after: Raw) -> None:
    """A line for each round claimed or committed, and for each condition that changed."""
    old, new = before.get("world") or {}, after.get("world") or {}
    claim = new.get("claim") or {}
    if claim and claim["claimId"] != (old.get("claim") or {}).get("claimId"):
        decision("claimed", job, round=claim["round"], claim=claim["claimId"], reason=claim.get("reason"))
    if new.get("round") != old.get("round"):
        members = [member["replica"] for member in new.get("members") or ()]
        decision("committed", job, round=new.get("round"), members=members)
    was = {c["type"]: (c["status"], c["reason"]) for c in before.get("conditions") or ()}
    for condition in after.get("conditions") or ():
        if was.get(condition["type"]) != (condition["status"], condition["reason"]):
            shown = {key: condition.get(key) for key in ("status", "reason", "message")}
            decision("condition", job, type=condition["type"], **shown)
