"""One job as the operator knows it, without its agents."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from concertina.api.spec import Launcher
from concertina.controller.cache.taken_back import TakenBack
from concertina.kube.resources import Raw
from concertina.plan.kueue import PodChanges, PodSet
from concertina.plan.observed import CreateRefusal, JobView, PodGroup, PodPhase, PodView
from concertina_protocol.traces import trace_id


@dataclass
class CachedJob:
    """One job with its pods, and the results of earlier passes."""

    view: JobView
    """View of the job. `deleting` is also set while the job's namespace is being deleted.

    Pods are deleted first then, so the job itself may not be marked yet (decision "A job in a namespace being deleted
    is deleted").
    """
    version: int
    status: Raw
    """Status as the API server has it. A write must find it unchanged."""
    pods: dict[str, PodView] = field(default_factory=dict)
    """Pods by uid."""
    namespace_ends: bool = False
    secret: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that is held while the job's Secret is created, so that a group of pods creates one."""
    secret_made_at: float | None = None
    """Time at which the Secret was last created, on the monotonic clock."""
    pod_group: PodGroup | None = None
    """Pod group as it was last written; None if none was, or if it was deleted since."""
    pod_group_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that is held while the pod group is written, so that a group of pods writes it once."""
    pod_group_made_at: float | None = None
    """Time at which the pod group was last written, on the monotonic clock."""
    pod_group_deleted: bool = False
    """Whether the pod group was deleted, and not written since."""
    refused: CreateRefusal | None = None
    """Reason why the last pod was not created."""
    taken: set[str] = field(default_factory=set)
    """Names that were found to belong to pods of others."""
    preconditions_failed: int = 0
    """Number of consecutive passes that failed a precondition."""
    decided_in: float = 0.0
    """Processor time in seconds of the last pass's decision. It is 0.03 for a job of a thousand replicas."""
    counted: tuple[str, float] | None = None
    """Last `status.goodput.at` that this operator has written, and the time of that write on the monotonic clock."""
    asked: bool = False
    """Whether this operator has asked agents of the job to prepare a round."""
    given_up: frozenset[str] = frozenset()
    """Uids of the job's pods that may be treated as dead because they are silent, for as long as they are silent."""
    taken_back: TakenBack = field(default_factory=TakenBack)
    creating: set[str] = field(default_factory=set)
    """Names of pods whose creation is under way."""
    conflict: tuple[tuple[int, Mapping[PodSet, PodChanges]], str] | None = None
    """Contradiction of the last admission and the template, with the generation and the changes that were compared."""
    queue_looked_for: bool = False
    """Whether Kueue's API was looked for since the job was seen with a queue."""
    writing_quota: bool = False
    """Whether a write to a Workload of the job is under way."""
    quota_refusal: str = ""
    """Message of the API server that refused the last write to a Workload of the job, or empty."""
    quota_refusals: int = 0
    """Number of consecutive writes to Workloads of the job that the API server refused."""
    quota_paused: bool = False
    """Whether no write to a Workload is tried yet, because the last one was refused."""
    planned: tuple[PodView, ...] = ()
    """Pods as the last complete pass saw them."""

    @property
    def name(self) -> str:
        return f"{self.view.namespace}/{self.view.name}"

    def named(self, round: int | None = None) -> dict[str, object]:
        """Return the fields that identify the job in the log, with a round and its trace.

        The round is the latest one by default.
        """
        number = self.view.status.world.latest_round if round is None else round
        return {"job": self.name, **({"round": number, "trace": trace_id(self.view.uid, number)} if number else {})}

    @property
    def lane(self) -> tuple[str, bool]:
        """Lane in which the job waits for writes: the jobs of its namespace with a round, or those without one."""
        return self.view.namespace, self.view.status.world.round > 0

    def counted_for(self, now: float) -> float | None:
        """Return `JobObservation.counted_for`.

        Args:
            now: Time on the monotonic clock.
        """
        if self.counted is None or self.counted[0] != self.view.status.goodput.at:
            return None
        return now - self.counted[1]

    def ended_unseen(self) -> list[PodView]:
        """Return the pods of torchrun that are gone, but whose end no complete pass has seen.

        Their end and their deletion arrived in one burst. The next pass sees these pods as ended. Otherwise it would
        use their names again, because the status lists members but not the pods of torchrun (decision "A pod of
        torchrun that goes in one burst").
        """
        if self.view.spec is None or self.view.spec.launcher is not Launcher.TORCHRUN:
            return []
        gone = (pod for pod in self.planned if pod.uid not in self.pods and not (pod.deleting or pod.ended))
        return [
            dataclasses.replace(p, phase=PodPhase.FAILED, deleting=True, exit_message="it was deleted") for p in gone
        ]
