"""Knowledge of the coordinator (the agent of the replica with rank 0) about the members of its round.

The module has no side effects.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Optional

from concertina_agent.core.round import failures
from concertina_agent.core.round.watchdog import Watchdog
from concertina_protocol import (
    DOUBT_SECONDS,
    SILENCE_SECONDS,
    Assign,
    Failure,
    FailureReason,
    Join,
    MemberState,
    Part,
    SnapshotId,
    State,
)

OVER = (State.SUCCEEDED, State.DRAINED, State.FAILED)
AT_ONCE, JOIN_GAP_SECONDS = 32, 0.002
"""Number of members above which their joins are spread over time, and the mean seconds between two joins.

The seconds are about the time that a TLS handshake takes the coordinator.
"""
REMAINING_SECONDS = SILENCE_SECONDS - DOUBT_SECONDS
"""Seconds from the time at which a member counts as silent until it counts as lost."""
SETTLE_SECONDS = 0.2
"""Seconds that the coordinator waits for further failures if a failure looks like the loss of a peer.

When a worker dies, the workers that lose their peer fail too. On a busy node, the failure of such a worker may arrive
before the failure of the dead worker. Without the wait, the wrong replica would be named as the cause.
"""


def join_seconds(members: int) -> float:
    """Return the time limit for joins, in seconds after Assign. A member that has not joined by then counts as lost.

    The coordinator is the agent of rank 0.
    """
    return 10.0 + 2 * JOIN_GAP_SECONDS * max(0, members - AT_ONCE)


class Coordinator:
    """Facts that the coordinator knows about a round: the members' states, the failures, and the shards in storage.

    Failures are listed in the order in which they arrived.

    The coordinator is the agent of rank 0. A round is a period in which a fixed set of replicas trains.
    """

    def __init__(self, assign: Assign, now: float) -> None:
        self.members = {
            m.replica: MemberState(m.replica, m.instance, assign.round, assign.claim, State.STARTING)
            for m in assign.members
        }
        self._workers = {m.replica: m.workers for m in assign.members}
        self.told = dict(self.members)
        """States of the members for the operator's report, without the members' steps.

        Steps change too often to report each change. The object is replaced whenever its contents have changed.
        """
        self._failures: dict[str, Failure] = {}
        self._join_seconds = join_seconds(len(assign.members))
        self._give_up_at = {m.replica: now + self._join_seconds for m in assign.members[1:]}
        self._joined: set[str] = set()
        self._settled_at: Optional[float] = None
        self.settled = False
        """True if the cause of the failures is known. Until then, the coordinator does not report the failures."""
        self._published: set[SnapshotId] = set()
        self._parts_changed = False
        """True if a member has reported new shards in storage since the last call of `publishable`."""
        self.ends_at: Optional[int] = None
        """Newest step that all members have saved completely, or None before a script has finished on all members.

        Once set, the value does not change (see `MemberState.ends_at`).
        """
        self._differ_since: Optional[float] = None
        """Time since which the members' last snapshots are known to be of different steps."""
        self._noticed: dict[str, float] = {}
        self.watchdog = Watchdog(assign.limits)

    def join(self, message: Join, now: float) -> Optional[str]:
        """Accept a member that joins, or refuse the member. Return None or the reason for the refusal."""
        state = self.members.get(message.replica)
        if state is None or state.instance != message.instance:
            return f"{message.replica} ({message.instance}) is not a member of round {message.round}"
        if state.failure is not None and state.failure.reason == FailureReason.MEMBER_LOST:
            return f"{message.replica} is already lost to round {message.round}"
        self._joined.add(message.replica)
        self._give_up_at[message.replica] = now + SILENCE_SECONDS
        return None

    def on_member_state(self, state: MemberState, now: float) -> bool:
        """Record a state that a member has sent. Return whether the coordinator's Report has changed.

        The coordinator is the agent of rank 0.
        """
        previous = self.members.get(state.replica)
        if previous is None or (previous.instance, previous.round, previous.claim) != (
            state.instance,
            state.round,
            state.claim,
        ):
            return False
        if state.replica in self._give_up_at:
            self._give_up_at[state.replica] = now + SILENCE_SECONDS
        if previous.failure is not None and state.failure is None:
            return False  # a member that was lost stays lost, because its round is over
        self.watchdog.on_heartbeats(state.replica, () if state.state in OVER else state.heartbeats, now)
        # The operator does not need these fields.
        state = dataclasses.replace(
            state, snapshot_step=None, heartbeats=(), hung=False, leaving=(), ends_at=None, silent=False
        )
        self._set(state)
        if state.failure is None:
            return state != previous
        self._failures[state.replica] = failures.better(self._failures.get(state.replica), state.failure)
        return self.settle(now) or state != previous

    def settle(self, now: float) -> bool:
        """Determine the cause of the round's failures. Return True only at the first call that determines a cause."""
        if self.settled or not self._failures:
            return False
        if self._settled_at is None:
            self._settled_at = now + SETTLE_SECONDS
        provoked = all(failures.looks_provoked(failure) for failure in self._failures.values())
        self.settled = not provoked or now >= self._settled_at
        return self.settled

    def lost(self, replica: str, detail: str, at: float) -> bool:
        """Record that a member is lost, because its stream broke or it is silent.

        Return whether the member was still needed.

        A member that has ended its part of the round is no longer needed.
        """
        member = self.members.get(replica)
        if member is None or member.state in OVER:
            return False
        self._fail(member, detail, at)
        return True

    def lost_part(self, replica: str, at: float) -> None:
        """Record that a member was lost before its shard of the run's last checkpoint was in storage.

        The round does not wait for such a shard (decision "No wait for checkpoint parts of lost members").
        """
        if self.members[replica].failure is None:
            self._fail(self.members[replica], "ended before its part of the last checkpoint was in storage", at)

    def agree_on_the_end(self, now: float, at: float) -> None:
        """Determine the last step of a script that has finished on all members, and store the step in `ends_at`.

        The last step is the newest step of which all members have a snapshot (decision "A script ends with a snapshot
        that all ranks have"). If there is no such step, the members that lack the newest snapshot have failed.
        """
        saved_steps = [member.saved for member in self.members.values() if member.saved is not None]
        if self.ends_at is not None or len(saved_steps) < len(self.members):
            return
        lacking = self.lacking_the_end()
        self._differ_since = (self._differ_since or now) if lacking else None
        if self._differ_since is not None and now < self._differ_since + SILENCE_SECONDS:
            return  # the last message of a worker may be read a little after the worker's exit
        self.ends_at = max(set.intersection(*map(set, saved_steps)), default=None)
        for replica, step in lacking.items() if self.ends_at is None else ():
            detail = (
                f"ended before its snapshot of step {step} was complete: call commit(step, "
                "durable=True) after the last step"
            )
            if self.members[replica].failure is None:
                self._fail(self.members[replica], detail, at, FailureReason.WORKER_EXITED_EARLY)

    def lacking_the_end(self) -> dict[str, int]:
        """Return the finished members that lack the newest snapshot of the round, each mapped to that snapshot's step.

        The newest snapshot is the one with the highest step among the snapshots of all members.
        """
        steps_by_replica = {
            replica: member.saved for replica, member in self.members.items() if member.saved is not None
        }
        newest = max((step for saved in steps_by_replica.values() for step in saved), default=0)
        return {replica: newest for replica, saved in steps_by_replica.items() if newest and newest not in saved}

    def _fail(
        self, member: MemberState, detail: str, at: float, reason: FailureReason = FailureReason.MEMBER_LOST
    ) -> None:
        replica = member.replica
        failure = Failure(replica, reason, f"{replica} {detail}.", step=member.step, at=at)
        self._failures.setdefault(replica, failure)
        self._set(dataclasses.replace(member, state=State.FAILED, failure=failure))
        self.settled = True

    def _set(self, state: MemberState) -> None:
        """Store the state of a member.

        Each of thousands of members sends its state twice per second. Values that are derived from the states are
        therefore computed again only if they may have changed.
        """
        before, reported = self.members[state.replica], self.told[state.replica]
        self.members[state.replica] = state
        failure = state.failure and dataclasses.replace(failures.brief(state.failure, len(self.members)), rollback=None)
        if (reported.state, reported.failure, reported.notice, reported.gpu_fault, reported.silent) != (
            state.state,
            failure,
            state.notice,
            state.gpu_fault,
            state.silent,
        ):
            report = dataclasses.replace(
                state, failure=failure, durable_parts=(), next_call=None, saved=None, world_mismatch=False
            )
            self.told = {**self.told, state.replica: report}
        if before.notice != state.notice:
            noticed = {name: member.notice for name, member in self.members.items()}
            self._noticed = {name: grace for name, grace in noticed.items() if grace is not None}
        self._parts_changed |= before.durable_parts != state.durable_parts

    def discount_pause(self, seconds: float) -> None:
        self._give_up_at = {replica: deadline + seconds for replica, deadline in self._give_up_at.items()}
        if self._differ_since is not None:
            self._differ_since += seconds

    def overdue(self, now: float) -> list[tuple[str, str]]:
        """Return the members that have missed a deadline, each with a phrase that says what the member failed to do."""
        never = f"did not join within {self._join_seconds:g} s"
        reasons = {True: f"has not answered for {SILENCE_SECONDS:g} s", False: never}
        late = [replica for replica, deadline in self._give_up_at.items() if now >= deadline]
        for replica in late:
            del self._give_up_at[replica]
        return [(replica, reasons[replica in self._joined]) for replica in late]

    def doubt(self, now: float) -> bool:
        """Mark the members that have been silent for DOUBT_SECONDS, and return whether a member is newly marked.

        The next line of a member removes its mark.
        """
        late = [replica for replica, deadline in self._give_up_at.items() if now >= deadline - REMAINING_SECONDS]
        members = [self.members[replica] for replica in late if replica in self._joined]
        silent = [member for member in members if not member.silent and member.state not in OVER]
        for member in silent:
            self._set(dataclasses.replace(member, silent=True))
        return bool(silent)

    def next_deadline(self, now: float) -> float:
        """Return the next time after `now` at which a member may count as silent or lost, or infinity."""
        times = (at for deadline in self._give_up_at.values() for at in (deadline - REMAINING_SECONDS, deadline))
        return min((at for at in times if at > now), default=math.inf)

    def check(self, now: float) -> bool:
        """Check for hangs and stragglers. Return whether a hang or straggler has appeared or ended since the last call.

        After a failure, the result is False. The round is over then, and its workers wait because of the failure, not
        because of a hang.
        """
        return not self._failures and self.watchdog.check(now)

    def all_train_alone(self) -> bool:
        """Return whether every worker of the round trains separately, without the other workers."""
        return all(member.world_mismatch for member in self.members.values())

    def all_are(self, state: State) -> bool:
        return all(member.state == state for member in self.members.values())

    def gone_unshipped(self, step: Optional[int]) -> list[str]:
        """Return the lost members that may not have uploaded all their shards of the snapshot at `step`.

        A member has uploaded all its shards if storage contains one shard for each worker of the member.
        """
        other_members = list(self.members.values())[1:]
        return [
            m.replica for m in other_members if m.replica not in self._give_up_at and not self._has_shipped(m, step)
        ]

    def _has_shipped(self, member: MemberState, step: Optional[int]) -> bool:
        parts = collections.Counter(
            part.id
            for part in member.durable_parts
            if step is None or part.id.step == step or (part.id.step > step and self.ends_at is None)
        )
        return max(parts.values(), default=0) >= self._workers[member.replica]

    def noticed(self) -> dict[str, float]:
        """Return the grace periods, in seconds, of the members with a termination notice, keyed by member name."""
        return self._noticed

    def failures(self) -> tuple[Failure, ...]:
        return failures.told(self._failures.values(), len(self.members)) if self.settled else ()

    def publishable(self) -> list[tuple[SnapshotId, bool]]:
        """Return snapshots whose shards are all in storage, each with True if it is of the run's last step.

        Each snapshot is returned only once.
        """
        if not self._parts_changed:
            return []
        self._parts_changed = False
        parts: dict[SnapshotId, set[Part]] = {}
        for member in self.members.values():
            for part in member.durable_parts:
                parts.setdefault(part.id, set()).add(part)
        ready = [
            (id, any(part.complete for part in shard_parts))
            for id, shard_parts in sorted(parts.items(), key=lambda item: item[0].step)
            if id not in self._published and _are_all(shard_parts, id.shards)
        ]
        self._published.update(id for id, _ in ready)
        return ready


def _are_all(parts: set[Part], shards: int) -> bool:
    """Return whether `parts` contains each shard from 0 to `shards` - 1, and no other shard.

    The numbers come from the members, so a faulty member could have reported any number.
    """
    numbers = {part.shard for part in parts}
    return len(numbers) == shards and numbers == set(range(len(numbers)))
