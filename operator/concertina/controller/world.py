"""All that the operator knows, as one consistent look at one job after the other."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from concertina.kube.parse.room import fits_quota
from concertina.kube.parse.views import OwnedPod, job_view
from concertina.kube.resources import Raw, version_of
from concertina.plan.lifecycle.admission import Waiting, by_quota, waiting
from concertina.plan.lifecycle.room import hindrance
from concertina.plan.types import AgentView, Competitor, JobView, NodeView, Observed, PodView, Refusal, Refused

PROGRESS_SECONDS = 2.0
WRITES_PER_SECOND = 20.0
"""Of progress, by all jobs together."""
ENDED = ("Complete", "Failed")


@dataclass
class Job:
    """What is known of one job beside its pods and agents."""

    view: JobView
    version: int
    status: Raw
    """As the API server has it: what a write must find unchanged."""
    secret: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its Secret is made, so that a group of pods makes one."""
    secret_made_at: float = 0.0
    refused: Refused | None = None
    """Why the last pod was not created."""
    ends: bool = False
    """Its namespace is being deleted; pods go first, so the job itself may not know for long."""
    taken: set[str] = field(default_factory=set)
    """Names that pods which are not ours were found to hold."""
    outdated: int = 0
    """Passes in a row that lost a precondition."""
    pods: dict[str, PodView] = field(default_factory=dict)
    """By uid."""
    planned: tuple[PodView, ...] = ()
    """Pods as the last complete pass saw them."""

    @property
    def name(self) -> str:
        return f"{self.view.namespace}/{self.view.name}"

    @property
    def seen(self) -> JobView:
        """As the plan is to see it."""
        return dataclasses.replace(self.view, deleting=True) if self.ends else self.view

    @property
    def unseen_ends(self) -> list[PodView]:
        """Pods of torchrun that no complete pass saw going: their deletion and their end were heard in one burst. The
        next one sees them as ended, or it would use their names again: they stand in no status, as members do."""
        if self.view.spec is None or self.view.spec.launcher != "torchrun":
            return []
        gone = (pod for pod in self.planned if pod.uid not in self.pods and not (pod.deleting or pod.ended))
        return [dataclasses.replace(p, phase="Failed", deleting=True, exit_message="it was deleted") for p in gone]

    @property
    def uri(self) -> str:
        """Where a live job checkpoints to; empty where it does not, or has ended."""
        spec = self.view.spec
        if spec is None or spec.checkpoint is None or self.ended:
            return ""
        return spec.checkpoint.uri.rstrip("/")

    @property
    def ended(self) -> bool:
        return any(c.type in ENDED and c.status == "True" for c in self.view.status.conditions)


class World:
    """`changed(uid)` is called for every job about which something new is known."""

    def __init__(
        self,
        changed: Callable[[str], None],
        agents: Callable[[str], Mapping[str, AgentView]],
        master_keys: tuple[str, ...] = (),
    ) -> None:
        self._changed = changed
        self._agents = agents
        self._master_keys = master_keys
        self._jobs: dict[str, Job] = {}
        self._orphans: dict[tuple[str, str], dict[str, PodView]] = {}
        """Pods, by uid, of jobs that are not known (yet, or any more), by the job's uid and namespace."""
        self._names: dict[tuple[str, str], dict[str, str]] = {}
        """Pods by namespace and the name of the job that they are named after: pod's name to uid of its job."""
        self._nodes: dict[str, NodeView] = {}
        self._uris: dict[str, set[str]] = {}
        self._waiting: dict[str, Waiting] = {}
        """Jobs that wait for room, by uid; right but for those in `_stale`."""
        self._stale: set[str] = set()

    def job(self, uid: str) -> Job | None:
        return self._jobs.get(uid)

    def jobs(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    # --- what is heard ---------------------------------------------------------------------------------------------

    def hear_job(self, obj: Raw) -> None:
        """A TrainingJob as the API server sent it, in an event or as the answer to a write; an older one is ignored."""
        uid, version = obj["metadata"]["uid"], version_of(obj)
        job = self._jobs.get(uid)
        if job is not None and version <= job.version:
            return
        view = job_view(obj, job.view if job else None)
        status: Raw = obj.get("status") or {}
        if job is None:
            job = self._jobs[uid] = Job(view, version, status, pods=self._orphans.pop((uid, view.namespace), {}))
            self._move(uid, "", job.uri)
        else:
            before, before_uri = job.view, job.uri
            job.view, job.version, job.status = view, version, status
            if view.generation != before.generation:
                job.refused = None  # what it asks for now has not been tried
            self._move(uid, before_uri, job.uri)
            if view == before:
                return
        self._stale.add(uid)
        self._changed(uid)

    def forget_job(self, uid: str) -> None:
        job = self._jobs.pop(uid, None)
        if job is not None:
            self._uris_changed(uid, job.uri, "")
            self._look_for_room(uid)
            if job.pods:
                self._orphans[uid, job.view.namespace] = job.pods

    def hear_pod(self, old: OwnedPod | None, new: OwnedPod | None) -> None:
        self._hear_name(old, new)
        for pod in (old, new):
            if pod is not None and pod.job_uid:
                pods = self._pods_of(pod)
                if pod is new:
                    pods[pod.view.uid] = pod.view
                elif new is None or new.view.uid != pod.view.uid:
                    pods.pop(pod.view.uid, None)
                if self._owner(pod) is not None:
                    self._stale.add(pod.job_uid)
                    self._changed(pod.job_uid)
                elif not pods:
                    self._orphans.pop((pod.job_uid, pod.namespace), None)
        if old is not None and new is None:
            self._room_in(old.namespace)

    def _hear_name(self, old: OwnedPod | None, new: OwnedPod | None) -> None:
        pod = new or old
        assert pod is not None
        key = pod.namespace, pod.view.name.rsplit("-", 2)[0]
        if new is not None:
            self._names.setdefault(key, {})[new.view.name] = new.job_uid
        elif names := self._names.get(key):
            names.pop(pod.view.name, None)
            if not names:
                del self._names[key]

    def hear_node(self, old: NodeView | None, new: NodeView | None) -> None:
        node = new or old
        assert node is not None
        name = node.name
        if new is None:
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = new
        for uid, job in self._jobs.items():
            if any(pod.node == name for pod in job.pods.values()):
                self._changed(uid)
        if _room(old) != _room(new):  # which job is too large may be news
            for uid in self._waiting:
                self._stale.add(uid)
                self._changed(uid)

    # --- one look --------------------------------------------------------------------------------------------------

    def observe(self, uid: str) -> Observed | None:
        """None where the job is not known."""
        job = self._jobs.get(uid)
        if job is None:
            return None
        competitors, waits = self._competitors(uid), self._waiting.get(uid)
        return Observed(
            job=job.seen,
            pods=tuple(sorted([*job.pods.values(), *job.unseen_ends], key=lambda pod: (pod.index, pod.attempt))),
            nodes=self._nodes,
            agents=self._agents(uid),
            fresh_claim=secrets.token_hex(8),
            secret_made=job.secret_made_at > 0,
            refused=job.refused,
            taken=self._taken(job),
            competitors=competitors,
            hindrance=waits.hindrance if waits else None,
            uri_holder=self._holder(uid, job),
            master_keys=self._master_keys,
            progress_every=max(PROGRESS_SECONDS, len(self._jobs) / WRITES_PER_SECOND),
        )

    def planned(self, uid: str, observed: Observed) -> None:
        """All that follows from this look has been done."""
        if job := self._jobs.get(uid):
            job.planned = observed.pods
            if any(pod.uid not in job.pods for pod in observed.pods):
                self._changed(uid)

    def create_refused(self, uid: str, kind: Refusal, sentence: str, ends: bool = False) -> None:
        """`ends`: as the job's namespace is being deleted."""
        if job := self._jobs.get(uid):
            now, before = time.time(), job.refused
            since = before.since if before and before.kind is kind else now
            job.refused, job.ends = Refused(kind, sentence[:1000], since, now), job.ends or ends
            self._stale.add(uid)
            self._changed(uid)

    def name_taken(self, uid: str, name: str) -> None:
        """By a pod of which the watch does not tell: a person's own, or one that is too new."""
        if job := self._jobs.get(uid):
            job.taken.add(name)
            self._changed(uid)

    def created(self, uid: str) -> None:
        if job := self._jobs.get(uid):
            job.refused = None

    def _competitors(self, uid: str) -> tuple[Competitor, ...]:
        self._stale.add(uid)
        while self._stale:
            self._look_for_room(self._stale.pop())
        mine = self._waiting.get(uid)
        if mine is None:
            return ()
        return tuple(
            other.competitor
            for name, other in self._waiting.items()
            if name != uid and other.needs_room_in(mine.competitor.namespace)
        )

    def _look_for_room(self, uid: str) -> None:
        """Whether that job waits for room; where that is news, those who hold room in vain, or none, look again."""
        job, before = self._jobs.get(uid), self._waiting.pop(uid, None)
        now = waiting(job.seen, job.pods.values(), by_quota(job.refused)) if job else None
        if job is not None and now is not None:
            quota = fits_quota(job.refused.message) if job.refused else None
            found = hindrance(now.least, job.pods.values(), self._nodes, quota)
            now = self._waiting[uid] = dataclasses.replace(now, hindrance=found)
        if (now and (now.competitor, now.hindrance)) == (before and (before.competitor, before.hindrance)):
            return
        for name, other in self._waiting.items():
            if name != uid and (other.held or other.away):
                self._changed(name)

    def _room_in(self, namespace: str) -> None:
        """A pod that is gone may free the quota that another one was refused for."""
        for uid, job in self._jobs.items():
            if by_quota(job.refused) and job.view.namespace == namespace:
                self.created(uid)
                self._changed(uid)

    def _taken(self, job: Job) -> frozenset[str]:
        names = self._names.get((job.view.namespace, job.view.name), {})
        return frozenset(job.taken).union(name for name, uid in names.items() if uid != job.view.uid)

    def _owner(self, pod: OwnedPod) -> Job | None:
        """Its job, where that is known. A pod of another namespace may name a job's uid, but is none of its pods."""
        job = self._jobs.get(pod.job_uid)
        return job if job is not None and job.view.namespace == pod.namespace else None

    def _pods_of(self, pod: OwnedPod) -> dict[str, PodView]:
        job = self._owner(pod)
        return job.pods if job else self._orphans.setdefault((pod.job_uid, pod.namespace), {})

    def _holder(self, uid: str, job: Job) -> str:
        rivals = self._uris.get(job.uri, set()) if job.uri else set()
        if len(rivals) < 2:
            return ""
        first = min((self._jobs[rival] for rival in rivals), key=lambda rival: (rival.view.created, rival.view.uid))
        return "" if first is job else first.name

    def _move(self, uid: str, old: str, new: str) -> None:
        if old != new:
            self._uris_changed(uid, old, new)

    def _uris_changed(self, uid: str, old: str, new: str) -> None:
        if old:
            self._uris[old].discard(uid)
        if new:
            self._uris.setdefault(new, set()).add(uid)
        for uri in {old, new} - {""}:
            for rival in self._uris[uri] - {uid}:
                self._changed(rival)
            if not self._uris[uri]:
                del self._uris[uri]


def _room(node: NodeView | None) -> tuple[object, ...]:
    """What a node says of how much could run there."""
    return (node.ready, node.cordoned, node.allocatable) if node else ()
