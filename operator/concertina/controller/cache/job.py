"""Data of the operator about one job, except for the states of the job's agents."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from concertina.api.spec import Launcher
from concertina.controller.cache.taken_back import TakenBack
from concertina.kube.resources import Raw
from concertina.plan.kueue import PodChanges, PodSet
from concertina.plan.observed import CreateRefusal, EvaluationJobView, JobView, PodGroup, PodPhase, PodView
from concertina_protocol.traces import trace_id


@dataclass
class CachedJob:
    """Data of one job: its object, its pods, and results of earlier planning passes and writes."""

    view: JobView
    """The job's spec, status and metadata. `deleting` is also set while the job's namespace is being deleted.

    When a namespace is deleted, pods are deleted first, so the job itself may have no deletion timestamp yet (decision
    "Jobs in a terminating namespace count as deleted").
    """
    version: int
    status: Raw
    """Status of the job as stored in the API server. A status write fails if the stored claim has changed since."""
    pods: dict[str, PodView] = field(default_factory=dict)
    """Pods of the job, keyed by uid."""
    namespace_ends: bool = False
    secret: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held during creation of the job's Secret, so that several pods created together create it once."""
    secret_made_at: float | None = None
    """Monotonic time at which the job's Secret was last created."""
    pod_group: PodGroup | None = None
    """Pod group as this operator last wrote it; None if it was never written or has been deleted."""
    pod_group_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held during writes of the pod group, so that several pods created together write it once."""
    pod_group_made_at: float | None = None
    """Monotonic time at which the pod group was last written."""
    pod_group_deleted: bool = False
    """True if the pod group was deleted and has not been written since."""
    refused: CreateRefusal | None = None
    """Last refused creation of a pod of the job; None if the API server currently accepts its pods."""
    taken: set[str] = field(default_factory=set)
    """Pod names that the job can't use, because pods of other owners already have them."""
    preconditions_failed: int = 0
    """Number of consecutive planning passes that failed because their observation was outdated."""
    decided_in: float = 0.0
    """Processor time in seconds of the last decision about the job. With a thousand replicas, it is about 0.03 s."""
    counted: tuple[str, float] | None = None
    """Last value of `status.goodput.at` that this operator wrote, with the monotonic time of the write."""
    asked: bool = False
    """True if this operator has sent Prepare calls to agents of the job."""
    given_up: frozenset[str] = frozenset()
    """Uids of the job's pods that count as dead until their silent agents report again."""
    taken_back: TakenBack = field(default_factory=TakenBack)
    creating: set[str] = field(default_factory=set)
    """Names of the job's pods that are being created."""
    conflict: tuple[tuple[int, Mapping[PodSet, PodChanges]], str] | None = None
    """Cached comparison of Kueue's last admission with the pod template; None before the first comparison.

    It consists of the job's generation and the admission's changes that were compared, and of a sentence that describes
    the contradiction (empty if there is none).
    """
    queue_looked_for: bool = False
    """True if the operator has checked for Kueue's API since the first time that it saw the job with a queue."""
    writing_quota: bool = False
    """True if a write to a Workload of the job is in progress."""
    quota_refusal: str = ""
    """Message with which the API server refused the last write to a Workload of the job; empty if accepted.
    """
    quota_refusals: int = 0
    """Number of consecutive refused writes to Workloads of the job."""
    quota_paused: bool = False
    """True if writes to Workloads are paused because the last one was refused."""
    evaluation_jobs: Mapping[str, EvaluationJobView] | None = None
    """Jobs of `spec.evaluationJob` by name; None if the operator has not listed them yet."""
    evaluation_looked_at: float | None = None
    """Monotonic time at which the operator last listed the Jobs of `spec.evaluationJob`; None before the first list."""
    evaluation_look: asyncio.Task[None] | None = None
    """Task that lists the Jobs of `spec.evaluationJob`; None if there was none yet."""
    planned: tuple[PodView, ...] = ()
    """Pods that the last completed planning pass observed."""

    @property
    def name(self) -> str:
        return f"{self.view.namespace}/{self.view.name}"

    @property
    def waits(self) -> bool:
        """True if the job has no round (no members chosen to train) yet, and this operator is not starting one."""
        world = self.view.status.world
        return not world.round and world.claim is None and not self.asked

    def named(self, round: int | None = None) -> dict[str, object]:
        """Return log fields with the names of the job and of one of its rounds, and the trace id of this round.

        By default, the round is the latest one.
        """
        number = self.view.status.world.latest_round if round is None else round
        return {"job": self.name, **({"round": number, "trace": trace_id(self.view.uid, number)} if number else {})}

    @property
    def lane(self) -> tuple[str, bool]:
        """Key by which jobs share a turn to write: the namespace, and whether the job has had a round."""
        return self.view.namespace, self.view.status.world.round > 0

    def counted_for(self, now: float) -> float | None:
        """Return the seconds since this operator last added the job's time to `status.goodput`, by the monotonic clock.

        The result is None if another operator process wrote the present value. plan() gets the result as
        `JobObservation.counted_for`.

        Args:
            now: Monotonic time in seconds.
        """
        if self.counted is None or self.counted[0] != self.view.status.goodput.at:
            return None
        return now - self.counted[1]

    def ended_unseen(self) -> list[PodView]:
        """Return pods of a torchrun job that ended and were deleted between two planning passes.

        The next planning pass treats them as ended pods. Otherwise it would use their names again, because the status
        does not list the members of a torchrun job (decision "Pods of torchrun that end between two passes").
        """
        if self.view.spec is None or self.view.spec.launcher is not Launcher.TORCHRUN:
            return []
        gone = (pod for pod in self.planned if pod.uid not in self.pods and not (pod.deleting or pod.ended))
        return [
            dataclasses.replace(p, phase=PodPhase.FAILED, deleting=True, exit_message="it was deleted") for p in gone
        ]
