"""One job as the operator knows it, beside its agents."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field

from concertina.api.spec import Launcher
from concertina.controller.cache.taken_back import TakenBack
from concertina.kube.resources import Raw
from concertina.plan.observed import CreateRefusal, JobView, PodPhase, PodView
from concertina_protocol.traces import trace_id


@dataclass
class CachedJob:
    view: JobView
    """With `deleting` also while its namespace is being deleted: pods go first, so the job itself may not know
    (decision "A job in a namespace being deleted is deleted")."""
    version: int
    status: Raw
    """As the API server has it: what a write must find unchanged."""
    pods: dict[str, PodView] = field(default_factory=dict)
    """By uid."""
    namespace_ends: bool = False
    secret: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its Secret is made, so that a group of pods makes one."""
    secret_made_at: float | None = None
    """On the monotonic clock."""
    refused: CreateRefusal | None = None
    """Why the last pod was not created."""
    taken: set[str] = field(default_factory=set)
    """Names that pods which are not ours were found to hold."""
    preconditions_failed: int = 0
    """Passes in a row that lost a precondition."""
    decided_in: float = 0.0
    """Seconds of processor time that the last pass took to decide: of a job of a thousand replicas 0.03."""
    counted: tuple[str, float] | None = None
    """The last `status.goodput.at` that this operator has written, and when that was on the monotonic clock."""
    given_up: frozenset[str] = frozenset()
    """Uids of its pods whose silence may be taken for death, for as long as they are silent."""
    taken_back: TakenBack = field(default_factory=TakenBack)
    planned: tuple[PodView, ...] = ()
    """Pods as the last complete pass saw them."""

    @property
    def name(self) -> str:
        return f"{self.view.namespace}/{self.view.name}"

    def named(self, round: int | None = None) -> dict[str, object]:
        """For lines of the log: the job, a round (the latest where none is given), and the trace of that."""
        number = self.view.status.world.latest_round if round is None else round
        return {"job": self.name, **({"round": number, "trace": trace_id(self.view.uid, number)} if number else {})}

    @property
    def lane(self) -> tuple[str, bool]:
        """In which it waits for writes: with those of its namespace that have a round as well, or none."""
        return self.view.namespace, self.view.status.world.round > 0

    def counted_for(self, now: float) -> float | None:
        """See JobObservation. `now`: on the monotonic clock."""
        if self.counted is None or self.counted[0] != self.view.status.goodput.at:
            return None
        return now - self.counted[1]

    def ended_unseen(self) -> list[PodView]:
        """Pods of torchrun that no complete pass saw going: their deletion and their end were heard in one burst. The
        next one sees them as ended, or it would use their names again: they stand in no status, as members do (decision
        "A pod of torchrun that goes in one burst")."""
        if self.view.spec is None or self.view.spec.launcher is not Launcher.TORCHRUN:
            return []
        gone = (pod for pod in self.planned if pod.uid not in self.pods and not (pod.deleting or pod.ended))
        return [
            dataclasses.replace(p, phase=PodPhase.FAILED, deleting=True, exit_message="it was deleted") for p in gone
        ]
