"""Run of a drill: inject a fault into a job, observe the recovery, revert the fault, and evaluate the observations."""

from __future__ import annotations

import time
from collections.abc import Callable

from concertina.api.status import JobStatus, unix_seconds
from concertina.drill.scenarios import Scenario
from concertina.drill.target import DrillTarget, Fault, Injection, ProgressSource
from concertina.drill.verdict import DrillObservation, DrillVerdict, Expect, Seconds, evaluate
from concertina.terminal.checkpoint_request import ask_for_checkpoint
from concertina.terminal.cluster_connection import UserError
from concertina.terminal.watch import JobWatch, Late
from concertina_protocol.log_lines import RoundStarted

STEADY, WHOLE, FRESH, TOLD, CHECKPOINT = 240.0, 240.0, 90.0, 90.0, 240.0  # Time limits in seconds.
Say = Callable[[str], None]


async def run(target: DrillTarget, name: str, scenario: Scenario, fault: Fault, say: Say) -> DrillVerdict:
    """Run a drill, and return its verdict.

    The steps are: wait until all replicas train, inject the fault, observe, revert the fault, observe again, and
    evaluate. If the fault can't be injected, the exception of `fault` is raised.

    Raises:
        UserError: When the scenario needs storage and the job has no spec.checkpoint.
        Late: When not all replicas train at the start.
    """
    if scenario.expect.checkpoint and not (await target.job())["spec"].get("checkpoint"):
        raise UserError(f"{target.name} has no spec.checkpoint: its storage can't be made unavailable.")
    async with JobWatch(target.client, target.namespace, target.name) as watch:
        say("waiting until all replicas train")
        before = await _steady(watch)
        pods = dict(watch.pods)
        recording = Recording(watch, before)
        async with fault(target) as injection:
            say(injection.text)
            await recording.after(injection, scenario.expect)
        say("reverted; waiting until all replicas train again")
        if scenario.expect.checkpoint:
            # Without this request, the next checkpoint may be ten minutes away.
            await ask_for_checkpoint(target.client, target.namespace, target.name)
        await recording.to_the_end(scenario.expect)
        same_pods = watch.pods == pods
    return evaluate(
        name, f"{target.namespace}/{target.name}", injection.text, scenario.expect, recording.seen(same_pods)
    )


async def _steady(watch: JobWatch) -> JobStatus:
    """Wait until all replicas train and have finished a step in the current round, and return the job's status."""

    def steady() -> JobStatus | None:
        status = watch.status
        has_step = status.progress is not None and status.world.since is not None
        is_whole = watch.training() and status.world.replicas == len(watch.pods) > 0 and _has_wanted_size(status)
        return status if has_step and is_whole else None

    return await watch.until("training with all replicas", STEADY, steady)


def _has_wanted_size(status: JobStatus) -> bool:
    """Return whether as many replicas train as the spec requests.

    The status contains both numbers as text, in the form 6/8.
    """
    have, _, want = status.world.size.partition("/")
    return have == want


class Recording:
    """Observations of the job since the drill has injected the fault."""

    def __init__(self, watch: JobWatch, before: JobStatus) -> None:
        self._watch, self._before = watch, before
        self._injection = Injection(0.0, "")
        self._start: RoundStarted | None = None
        self._first_after: float | None = None
        self._first_status = before
        self._named_after: float | None = None
        self._reported_after: float | None = None
        self._whole_after: float | None = None
        self._checkpoint_after: float | None = None
        self._missing_event = ""

    async def after(self, injection: Injection, expect: Expect) -> None:
        """Wait for the first step after the injection, and for a condition that reports the fault if one is expected.

        If the step or the condition does not come in time, the wait ends, and the observations name the missing event.
        """
        self._injection = injection
        try:
            if expect.named:
                await self._straggler(expect.seconds)
            elif expect.new_round:
                await self._new_round(expect.seconds)
            elif injection.sight is ProgressSource.ALL or (
                injection.sight is ProgressSource.LOGS and self._watch.bundled
            ):
                await self._same_round(expect.seconds)
            if expect.told:
                words = ", ".join(expect.told)
                await self._watch.until(
                    f"a condition with the text {words}", TOLD, lambda: self._reports_trouble(expect)
                )
                self._reported_after = self._watch.seen_at - injection.at
        except Late as error:
            self._missing_event = str(error)

    async def to_the_end(self, expect: Expect) -> None:
        """After the revert of the fault, wait until the job has all its replicas again and reports no fault."""
        reverted = time.time()
        watch, rounds = self._watch, self._before.world.round
        try:
            if expect.new_round is False and self._first_after is None and not self._missing_event:
                at = await watch.until("news of the job", FRESH, lambda: self._progress_since(reverted))
                self._first_after = at - reverted
            replicas = self._before.world.replicas
            await watch.until(
                f"a round of {replicas} replicas",
                WHOLE,
                lambda: (
                    watch.training()
                    and watch.status.world.replicas == replicas
                    and (not expect.new_round or watch.status.world.round > rounds)
                    and self._progress_since(reverted)
                    and not self._reports_trouble(expect)
                ),
            )
            self._whole_after = time.time() - self._injection.at
            if expect.checkpoint:
                self._checkpoint_after = await watch.until(
                    "a new checkpoint", CHECKPOINT, lambda: self._saved_since(reverted)
                )
                self._checkpoint_after -= self._injection.at
        except Late as error:
            self._missing_event = self._missing_event or str(error)

    async def _new_round(self, seconds: float) -> None:
        """Wait for the first step of a new round.

        The time of this step comes from the log of the bundled trainer. For a user's script, it is the time at which
        the status showed the new round.
        """
        watch, rounds = self._watch, self._before.world.round

        def start() -> RoundStarted | None:
            return watch.first_start(rounds, self._injection.at)

        def at_work() -> bool:
            return watch.training() and watch.status.world.round > rounds

        await watch.until("the first step of a new round", seconds, start if watch.bundled else at_work)
        self._start = start()
        self._first_after = (self._start.at if self._start else watch.seen_at) - self._injection.at
        await watch.until("the status of the new round", FRESH, lambda: self._claimed_after() and at_work())
        self._first_status = watch.status

    async def _same_round(self, seconds: float) -> None:
        """Wait until training continues in the same round.

        A log line or a status that is newer than the injection is the evidence for this.
        """
        watch, step = self._watch, self._watch.step
        news = f"a step within {seconds:g} s"
        await watch.until(news, seconds, lambda: watch.step > step + 1 or self._progress_since(self._injection.at + 1))
        self._first_after = time.time() - self._injection.at

    async def _straggler(self, seconds: float) -> None:
        """Wait until `status.stragglers` contains the replica that the drill slows down."""

        def named() -> bool:
            return any(mark.replica == self._injection.replica for mark in self._watch.status.stragglers)

        await self._watch.until(f"{self._injection.replica} in status.stragglers", seconds, named)
        self._named_after = self._watch.seen_at - self._injection.at

    def _reports_trouble(self, expect: Expect) -> bool:
        trouble = self._watch.status.trouble
        if not expect.told or trouble is None:
            return False
        return all(word in f"{trouble.reason}: {trouble.message}" for word in expect.told)

    def _claimed_after(self) -> bool:
        return self._watch.status.world.round > self._before.world.round

    def _progress_since(self, at: float) -> float | None:
        progress = self._watch.status.progress
        when = unix_seconds(progress.at) if progress else 0.0
        return when if when > at else None

    def _saved_since(self, at: float) -> float | None:
        saved, previous = self._watch.status.last_checkpoint, self._before.last_checkpoint
        new = saved is not None and (previous is None or saved.step > previous.step)
        return unix_seconds(saved.at) if saved and new and unix_seconds(saved.at) > at else None

    def seen(self, same_pods: bool) -> DrillObservation:
        """Return all observations of the drill, for the verdict."""
        initial_status, first_status, final_status = self._before, self._first_status, self._watch.status
        claim = first_status.world.claim
        # Both statuses are searched. The drill may end after failurePolicy.windowSeconds, when the last status no
        # longer lists the failure.
        listed = {
            (entry.at, entry.replica): entry
            for status in (first_status, final_status)
            for entry in status.restarts.recent
        }
        new = [entry for entry in listed.values() if unix_seconds(entry.at) >= self._injection.at]
        words = [f"{entry.reason} of {entry.replica}" for entry in new[:1]]
        if claim and first_status.world.round > initial_status.world.round:
            words.append(f"{claim.reason}: {claim.message}")
        elif final_status.world.claim and final_status.world.round > initial_status.world.round:
            words.append(f"{final_status.world.claim.reason}: {final_status.world.claim.message}")
        return DrillObservation(
            seconds=Seconds(
                claimed=self._since(claim.at if claim else None),
                committed=self._since(first_status.world.since),
                first_step=self._first_after,
                named=self._named_after,
                told=self._reported_after,
                whole=self._whole_after,
                checkpoint=self._checkpoint_after,
            ),
            before=initial_status.world.replicas,
            after=first_status.world.replicas,
            end=final_status.world.replicas,
            rounds=first_status.world.round - initial_status.world.round,
            rounds_in_all=final_status.world.round - initial_status.world.round,
            replayed=final_status.steps_replayed - initial_status.steps_replayed,
            counted=sum(entry.counted for entry in new),
            cause="; ".join(words),
            start=self._start,
            same_pods=same_pods,
            steps_meanwhile=max(0, self._watch.step - (initial_status.progress.step if initial_status.progress else 0)),
            missing=self._missing_event,
        )

    def _since(self, timestamp: str | None) -> float | None:
        """Return the seconds from the injection to a timestamp, or None if the timestamp is missing or earlier."""
        seconds = unix_seconds(timestamp) - self._injection.at if timestamp else None
        return round(seconds, 4) if seconds is not None and seconds >= 0 else None
