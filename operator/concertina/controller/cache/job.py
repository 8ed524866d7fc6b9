"""What the operator knows about one job, except for the job's agents."""

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
    """One job with its pods, and with results of earlier planning passes."""

    view: JobView
    """The job's spec, status and metadata. `deleting` is also set while the job's namespace is being deleted.

    When a namespace is deleted, pods are deleted first, so the job itself may have no deletion timestamp yet (decision
    "Jobs in a terminating namespace count as deleted").
    """
    version: int
    status: Raw
    """Status of the job as stored in the API server. A write requires that it is unchanged."""
    pods: dict[str, PodView] = field(default_factory=dict)
    """Pods, keyed by uid."""
    namespace_ends: bool = False
    secret: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held during creation of the job's Secret, so that several pods created together create it once."""
    secret_made_at: float | None = None
    """Monotonic time at which the job's Secret was last created."""
    pod_group: PodGroup | None = None
    """Pod group as it was last written; None if none was written, or if it has been deleted."""
    pod_group_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held during writes of the pod group, so that several pods created together write it once."""
    pod_group_made_at: float | None = None
    """Monotonic time at which the pod group was last written."""
    pod_group_deleted: bool = False
    """True if the pod group was deleted and not written again."""
    refused: CreateRefusal | None = None
    """The last refused creation of a pod; None if pods are accepted."""
    taken: set[str] = field(default_factory=set)
    """Pod names that turned out to belong to pods of other owners."""
    preconditions_failed: int = 0
    """Number of passes in a row that failed because of an outdated observation."""
    decided_in: float = 0.0
    """Processor time in seconds of the last decision. With a thousand replicas, it is about 0.03."""
    counted: tuple[str, float] | None = None
    """`status.goodput.at` as this operator last wrote it, with the monotonic time of that write."""
    asked: bool = False
    """True if this operator has sent Prepare calls to agents of the job."""
    given_up: frozenset[str] = frozenset()
    """Uids of the job's pods that count as dead while they are silent."""
    taken_back: TakenBack = field(default_factory=TakenBack)
    creating: set[str] = field(default_factory=set)
    """Names of pods that are being created."""
    conflict: tuple[tuple[int, Mapping[PodSet, PodChanges]], str] | None = None
    """Contradiction between the last admission and the pod template; empty text for none.

    It is stored with the job's generation and the admission's changes that were compared.
    """
    queue_looked_for: bool = False
    """True if the operator has looked for Kueue's API since this job was first seen with a queue."""
    writing_quota: bool = False
    """True if a write to a Workload of the job is in progress."""
    quota_refusal: str = ""
    """Message with which the API server refused the last write to a Workload of the job; empty if it did not."""
    quota_refusals: int = 0
    """Number of refused writes to Workloads of the job in a row."""
    quota_paused: bool = False
    """True if writes to Workloads are paused because the last one was refused."""
    evaluation_jobs: Mapping[str, EvaluationJobView] | None = None
    """Jobs of `spec.evaluationJob` by name; None if the operator has not looked for them."""
    evaluation_looked_at: float | None = None
    """Monotonic time of the last look; None if there was none."""
    evaluation_look: asyncio.Task[None] | None = None
    """The look in progress, or None."""
    planned: tuple[PodView, ...] = ()
    """Pods that the last complete pass observed."""

    @property
    def name(self) -> str:
        return f"{self.view.namespace}/{self.view.name}"

    @property
    def waits(self) -> bool:
        """True if the job has no round yet and this operator is not forming one."""
        world = self.view.status.world
        return not world.round and world.claim is None and not self.asked

    def named(self, round: int | None = None) -> dict[str, object]:
        """Return the log fields that identify the job, one of its rounds, and the trace of this round.

        Without an argument, the round is the latest one.
        """
        number = self.view.status.world.latest_round if round is None else round
        return {"job": self.name, **({"round": number, "trace": trace_id(self.view.uid, number)} if number else {})}

    @property
    def lane(self) -> tuple[str, bool]:
        """Key of the job's turn to write to the API server. Jobs with the same key share a turn.

        The key consists of the job's namespace, and of whether the job has had a round.
        """
        return self.view.namespace, self.view.status.world.round > 0

    def counted_for(self, now: float) -> float | None:
        """Return the seconds since the job's time was last counted for `status.goodput`, by the monotonic clock.

        The result is None if this operator did not make the last count. plan() gets the result as
        `JobObservation.counted_for`.

        Args:
            now: Monotonic time.
        """
        if self.counted is None or self.counted[0] != self.view.status.goodput.at:
            return None
        return now - self.counted[1]

    def ended_unseen(self) -> list[PodView]:
        """Return pods of torchrun that ended and were deleted between two planning passes.

        The next planning pass treats them as ended pods. Otherwise it would use their names again, because the status
        lists no members of a torchrun job (decision "Pods of torchrun that end between two passes").
        """
        if self.view.spec is None or self.view.spec.launcher is not Launcher.TORCHRUN:
            return []
        gone = (pod for pod in self.planned if pod.uid not in self.pods and not (pod.deleting or pod.ended))
        return [
            dataclasses.replace(p, phase=PodPhase.FAILED, deleting=True, exit_message="it was deleted") for p in gone
        ]
