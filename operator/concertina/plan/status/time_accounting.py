"""Accounting of a job's time (`status.goodput`), of its incidents (`incidents`) and of its cost (`cost`).

All time is measured with one clock. Each calculation adds the seconds since the last calculation to the class of the
job's phase. It then moves the waiting times that workers report to classes of their own, but never more seconds than
were added. The classes therefore always add up to the time since the job was created, whatever workers report.

The time in which a script's workers run counts as productive only if the script has reported a step in that round. Some
scripts report no steps (decision "Time without known steps is a class of its own").

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import concertina_protocol as protocol
from concertina.api.accounting import (
    CLASSES,
    MOST_CAUSES,
    MOST_INCIDENTS,
    Cost,
    Goodput,
    Incident,
    RecoveryTime,
    RoundWaits,
)
from concertina.api.status import AT_REST, JobProgress, rfc3339, unix_seconds
from concertina.plan.facts.cached import cached
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase
from concertina_protocol import StepPart

OTHER = "Other"
HOUR = 3600.0
STOPPED = (Phase.DRAINING, Phase.RECOVERING, Phase.WAITING, Phase.STALLED)
"""Phases of a job that has trained before, should be training, and is not."""
BUCKETS: Mapping[Phase, str] = {
    **{Phase(phase): bucket for phase, bucket in AT_REST.items()},
    Phase.STARTING: "startup_seconds",
    Phase.TRAINING: "productive_seconds",
    Phase.DRAINING: "recovery_seconds",
    Phase.RECOVERING: "recovery_seconds",
    Phase.SUSPENDING: "suspended_seconds",
    Phase.DELETING: "suspended_seconds",
}
"""Class of time in `status.goodput` for each phase of a job. The time after a job's end is not counted."""


@dataclass(frozen=True)
class CoordinatorTimes:
    """Waiting times from the coordinator's report, by which training time is divided into classes.

    The coordinator is the agent of rank 0.
    """

    progress: protocol.Progress
    busy: protocol.Busy | None
    measures_work: bool
    """True if the ranks measure their own work time. `busy` is None until all of them have reported one."""

    def part(self, name: StepPart) -> float:
        return self.progress.seconds.get(name, 0.0)

    @property
    def communication(self) -> float:
        """Seconds in which rank 0 waited for the network.

        In collectives, rank 0 also waits for slower ranks. That time is not included, and the result is 0 while it is
        unknown.
        """
        waited = sum(map(self.part, protocol.COMMUNICATION))
        if self.busy is None:
            return 0.0 if self.measures_work else waited
        return max(0.0, waited - (self.busy.most - self.busy.coordinator))

    @property
    def straggler(self) -> float:
        """Seconds in which all ranks waited for the slowest one.

        This is the time of the slowest rank minus the time of a median rank, which counts as productive.
        """
        return max(0.0, self.busy.most - self.busy.median) if self.busy else 0.0


WAITS: Mapping[str, tuple[str, Callable[[CoordinatorTimes], float]]] = {
    "checkpoint_seconds": ("checkpoint_seconds", lambda times: times.progress.checkpoint_seconds),
    "stalled_seconds": ("input_seconds", lambda times: times.progress.stalled_seconds),
    "evaluation_seconds": ("evaluation_seconds", lambda times: times.part(StepPart.EVALUATION)),
    "compile_seconds": ("compile_seconds", lambda times: times.part(StepPart.COMPILE)),
    "communication_seconds": ("communication_seconds", lambda times: times.communication),
    "straggler_seconds": ("straggler_seconds", lambda times: times.straggler),
}
"""Class of goodput and reported seconds since the round began, for each field of RoundWaits."""


@dataclass(frozen=True)
class Account:
    """Calculation of how a job spent its time since the last calculation."""

    ctx: JobContext
    decision: Decision
    progress: JobProgress | None
    """Training progress in the status after this pass."""
    replayed: int
    """Number of steps that will be trained again, as determined in this planning pass."""

    # --- the seconds of this count ------------------------------------------------------------------------------------

    @cached
    def elapsed(self) -> float:
        """Seconds since the job's time was last counted.

        If this operator made that count, the seconds are by its monotonic clock.
        """
        counted, observed = self.ctx.status.goodput.at, self.ctx.observed
        if counted is not None and observed.counted_for is not None:
            return observed.counted_for
        return max(0.0, self.ctx.now - (unix_seconds(counted) if counted else observed.job.created))

    @cached
    def phase(self) -> Phase:
        """Phase of the job in which the seconds of this calculation were spent."""
        phase_name = self.ctx.status.phase
        return Phase(phase_name) if phase_name in Phase._value2member_map_ else Phase.WAITING

    @cached
    def late(self) -> float:
        """Seconds of this calculation between a failure of the round and the time when the operator noticed it."""
        failures = self.ctx.round.report.failures if self.ctx.round.report else ()
        failed_at = min((failure.at for failure in failures if failure.at is not None), default=self.ctx.now)
        return min(self.elapsed, max(0.0, self.ctx.now - failed_at)) if self.phase is Phase.TRAINING else 0.0

    @cached
    def bucket(self) -> str | None:
        """Class in `status.goodput` to which the time in this phase belongs; None for a job that has ended."""
        phase_bucket = BUCKETS.get(self.phase)
        return self._start if phase_bucket == "recovery_seconds" else phase_bucket

    @property
    def _start(self) -> str:
        """Class of time in `status.goodput` for the start of the current round.

        A start after a failure or a change of members counts as recovery; any other start counts as startup.
        """
        return "recovery_seconds" if self._incident_before else "startup_seconds"

    # --- whether the workers make steps -------------------------------------------------------------------------------

    @cached
    def _reports_steps(self) -> bool:
        """Return whether the workers are known to report each step.

        A script is known to do so after it has reported one step.
        """
        return self.ctx.keeps_state or self.ctx.status.progress is not None

    @cached
    def _reported(self) -> protocol.Progress | None:
        """Progress of the committed round that rank 0 reported last.

        A round is committed once the operator has chosen its members.
        """
        return self.ctx.round.report.progress if self.ctx.round.report else None

    @cached
    def _first_step_at(self) -> float | None:
        """Unix time at which rank 0 reported the first step of the committed round, by the clock of rank 0.

        A round is committed once the operator has chosen its members.
        """
        return self._reported.first_step_at if self._reported else None

    @cached
    def _counted_as_stepping(self) -> bool:
        """Return whether a step of the committed round was already known when the job's time was last counted.

        A round is committed once the operator has chosen its members.
        """
        if self._reported and self._first_step_at is None:
            return False
        round = self.ctx.world.round
        return round > 0 and self.ctx.status.internal.round_waits.round == round

    @cached
    def before_first_step(self) -> float:
        """Seconds since the last count in which a script's workers ran before the first reported step of the round."""
        ran = self.elapsed - self.late
        if self.phase is not Phase.TRAINING or self.ctx.spec.bundled or self._counted_as_stepping:
            return 0.0
        if self._first_step_at is None:
            return ran
        return max(0.0, ran - max(0.0, self.ctx.now - self._first_step_at - self.late))

    @cached
    def _bucket_before_first_step(self) -> str:
        return self._start if self._reports_steps else "unknown_seconds"

    @cached
    def _unknown_was_startup(self) -> bool:
        """Return whether the job's first report proves that the workers made no step before it.

        The report proves this if it is about the first step of the run, if the script commits each step, or if
        optimizer steps are counted. In a later round of the job, a first report does not prove this, because workers of
        earlier rounds may have made steps without reporting them.
        """
        status, reported = self.ctx.status, self._reported
        if reported is None or self._first_step_at is None or status.progress is not None or status.rounds > 1:
            return False
        return self.ctx.keeps_state or reported.restored_step == 0 or bool(reported.optimizer)

    @cached
    def waits(self) -> RoundWaits:
        """Total seconds for which the workers of this round have waited since the round began, by kind of wait.

        The workers report these seconds. A reported value is a difference of two measurements and may fall. The result
        never falls, because otherwise a time by which it falls and rises again would be counted twice.
        """
        report, old = self.ctx.round.report, self.ctx.status.internal.round_waits
        if report is None or report.progress is None:
            return old
        times = CoordinatorTimes(report.progress, report.busy, self.ctx.spec.bundled and self.ctx.world.workers > 1)
        counted = old if old.round == report.round else RoundWaits()
        seconds = {name: max(getattr(counted, name), round(count(times), 3)) for name, (_, count) in WAITS.items()}
        return RoundWaits(round=report.round, **seconds)

    # --- classes of time ----------------------------------------------------------------------------------------------

    @cached
    def goodput(self) -> Goodput:
        old = self.ctx.status.goodput
        if self.bucket is None:
            return old
        spent = {name: getattr(old, name) for name in CLASSES}
        spent[self.bucket] += self.elapsed - self.late - self.before_first_step
        spent[self._bucket_before_first_step] += self.before_first_step
        spent["recovery_seconds"] += self.late
        if self.before_first_step:
            self._move_waits(spent, self._bucket_before_first_step, self.before_first_step)
        else:
            self._move_waits(spent, self.bucket, self.elapsed - self.late)
        if self._unknown_was_startup:
            _move(spent, "unknown_seconds", "startup_seconds", spent["unknown_seconds"])
        _move(spent, "productive_seconds", "replayed_seconds", self.replayed_seconds)
        active = sum(spent.values()) - spent["suspended_seconds"]
        return old.model_copy(
            update={
                **{name: round(value, 3) for name, value in spent.items()},
                "percent": self._percent(spent),
                "tokens_per_second": round(self._tokens / active, 3) if self._tokens and active else None,
                "recovery": self._recovery(spent["recovery_seconds"] - old.recovery_seconds),
                "at": rfc3339(round(self.ctx.now, 3)),
            }
        )

    def _percent(self, spent: Mapping[str, float]) -> float | None:
        """Return the goodput: the time in which new steps were made, in percent of the job's time.

        The job's time does not include suspended time, or time in which it is unknown whether steps were made. The
        result is None if a script's workers have run but no step is known. Otherwise the goodput would be 0, although
        the workers may have made steps.
        """
        ran = spent["unknown_seconds"] > 0 or self.decision.phase is Phase.TRAINING
        if ran and self.progress is None and not self.ctx.spec.bundled:
            return None
        known_seconds = sum(spent.values()) - spent["suspended_seconds"] - spent["unknown_seconds"]
        forward = spent["productive_seconds"] + spent["communication_seconds"]
        return round(100 * forward / known_seconds, 2) if known_seconds else 0.0

    @cached
    def tokens_before(self) -> int | None:
        """Count of the tokens on which earlier jobs trained the model; None before the first report.

        If the job continues another job's checkpoint, this is the number of tokens in the first report.
        """
        report, old = self.ctx.round.report, self.ctx.status
        progress = report.progress if report else None
        if old.internal.tokens_before is not None or progress is None or progress.tokens is None:
            return old.internal.tokens_before
        goes_on = old.progress is None and bool(progress.restored_step)
        return progress.tokens if goes_on else 0

    @cached
    def _tokens(self) -> int | None:
        """Count of the tokens on which this job has trained; None if unknown."""
        tokens = self.progress.tokens if self.progress else None
        return None if tokens is None else max(0, tokens - (self.tokens_before or 0))

    def _move_waits(self, spent: dict[str, float], source: str, counted: float) -> None:
        """Move waiting time from the class `source`, in which it was counted, to classes of its own.

        Only newly reported waiting time is moved, and at most the `counted` seconds from `source`. Waiting time beyond
        these seconds belongs to steps that an earlier calculation counted as productive, so it is moved from the
        productive class.
        """
        old, new = self.ctx.status.internal.round_waits, self.waits
        for name, (bucket, _) in WAITS.items():
            last_waits = getattr(old, name) if old.round == new.round else 0.0
            waited = max(0.0, getattr(new, name) - last_waits)
            of_this_count = min(waited, counted)
            counted -= of_this_count
            _move(spent, source, bucket, of_this_count)
            _move(spent, "productive_seconds", bucket, waited - of_this_count)

    @cached
    def replayed_seconds(self) -> float:
        """Seconds that the lost steps took. The job trains these steps again."""
        last_progress, reported = (
            self.ctx.status.progress,
            self.ctx.round.report.progress if self.ctx.round.report else None,
        )
        seconds = (last_progress.step_seconds if last_progress else None) or (
            reported.step_seconds if reported else 0.0
        )
        return min(self.replayed * seconds, self.ctx.status.goodput.productive_seconds)

    def _recovery(self, seconds: float) -> tuple[RecoveryTime, ...]:
        """Return the recovery time by cause. The given seconds, and an incident that has just ended, are included."""
        time_by_cause = {entry.cause: entry for entry in self.ctx.status.goodput.recovery}
        incident, ended = self._with_this, self._ended
        if incident is None or (seconds <= 0 and ended is None):
            return self.ctx.status.goodput.recovery
        cause = incident.cause if incident.cause in time_by_cause or len(time_by_cause) < MOST_CAUSES - 1 else OTHER
        entry = time_by_cause.get(cause, RecoveryTime(cause=cause))
        time_by_cause[cause] = entry.model_copy(
            update={"seconds": round(entry.seconds + seconds, 3), "times": entry.times + (ended is not None)}
        )
        return tuple(time_by_cause.values())

    # --- incidents ----------------------------------------------------------------------------------------------------

    @cached
    def _incident_before(self) -> Incident | None:
        return self.ctx.status.internal.incident

    @cached
    def _with_this(self) -> Incident | None:
        """Add the seconds of this calculation to the current incident (a time without training), if there is one."""
        incident = self._incident_before or self._begun()
        if incident is None:
            return None
        stepping = self.elapsed - self.late - self.before_first_step if self.phase is Phase.TRAINING else 0.0
        seconds = self.elapsed - stepping if self._incident_before else self.late
        cost = None if self.rate is None else (incident.cost or 0.0) + self.rate * (seconds + self.replayed_seconds)
        return incident.model_copy(
            update={
                "seconds": round(incident.seconds + seconds, 3),
                "steps_replayed": incident.steps_replayed + self.replayed,
                "replayed_seconds": round(incident.replayed_seconds + self.replayed_seconds, 3),
                "cost": cost if cost is None else round(cost, 6),
            }
        )

    @cached
    def _goes_on(self) -> bool:
        """Return whether the present incident (a time without training) continues.

        An incident ends with the next step. If the script reports no steps, the incident ends when the workers run.
        """
        if self.decision.phase is Phase.TRAINING and not self.ctx.spec.bundled and self._incident_before:
            return self._reports_steps and self._first_step_at is None and not self._counted_as_stepping
        return self.decision.phase in STOPPED or self.decision.phase is Phase.STARTING

    @cached
    def incident(self) -> Incident | None:
        return self._with_this if self._goes_on else None

    @cached
    def _ended(self) -> Incident | None:
        if self._goes_on or self._with_this is None:
            return None
        resumed = self.decision.phase is Phase.TRAINING
        return self._with_this.model_copy(update={"at_least": resumed and not self._reports_steps})

    @cached
    def incidents(self) -> tuple[Incident, ...]:
        old = self.ctx.status.incidents
        return (*old, self._ended)[-MOST_INCIDENTS:] if self._ended else old

    def _begun(self) -> Incident | None:
        decision, ctx = self.decision, self.ctx
        stops = self.phase is Phase.TRAINING and decision.phase in STOPPED
        if not stops and (decision.restart is None or decision.phase is Phase.TRAINING):
            return None  # a straggler is being replaced while training continues; the incident begins with the drain
        failure = decision.last_failure
        return Incident(
            at=rfc3339(round(ctx.now - self.late, 3)),
            round=ctx.world.round,
            cause=failure.reason if failure else decision.reason,
            replica=failure.replica if failure else "",
            node=failure.node if failure else "",
        )

    # --- cost ---------------------------------------------------------------------------------------------------------

    @cached
    def _replicas(self) -> tuple[int, int]:
        """Replicas on on-demand nodes and on spot nodes, as two counts. Replicas without a node cost nothing."""
        is_spot = [self.ctx.node(pod).spot for pod in self.ctx.observed.pods if pod.node and not pod.released]
        return len(is_spot) - sum(is_spot), sum(is_spot)

    @cached
    def rate(self) -> float | None:
        """Price per second of all existing replicas; None if the spec has no price."""
        price = self.ctx.spec.price
        if price is None:
            return None
        plain, spot = self._replicas
        return (plain * price.replica_hour + spot * price.spot_replica_hour) / HOUR

    @cached
    def cost(self) -> Cost | None:
        price, old = self.ctx.spec.price, self.ctx.status.cost or Cost()
        if price is None or self.rate is None or self.bucket is None:
            return self.ctx.status.cost
        hours = self.elapsed / HOUR
        plain, spot = self._replicas
        total = old.total + self.rate * self.elapsed
        return Cost(
            currency=price.currency,
            total=round(total, 6),
            replica_hours=round(old.replica_hours + (plain + spot) * hours, 6),
            spot_replica_hours=round(old.spot_replica_hours + spot * hours, 6),
            per_million_tokens=round(1e6 * total / self._tokens, 6) if self._tokens else None,
        )


def _move(spent: dict[str, float], source: str, target: str, seconds: float) -> None:
    """Move seconds from one class to another.

    At most the seconds in the source class are moved, so the sum stays the same.
    """
    moved = min(max(0.0, seconds), spent[source])
    spent[source] -= moved
    spent[target] += moved
