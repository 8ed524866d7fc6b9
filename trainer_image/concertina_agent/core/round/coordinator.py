"""What the coordinator knows about the members of its round. Pure."""

from __future__ import annotations

import collections
import dataclasses
from typing import Optional

from concertina_agent.core.round import failures
from concertina_agent.core.round.watchdog import Watchdog
from concertina_protocol import (
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
"""More members than that join the coordinator one after another, at this distance on average: a handshake takes it as
long."""
SETTLE_SECONDS = 0.2
"""How long a failure that looks like a lost peer waits for the one that it follows from: on a busy node a survivor may
end before the news of the dead worker is here, and the wrong replica would be blamed."""


def join_seconds(members: int) -> float:
    """A member that has not joined the coordinator this long after the coordinator's own Assign is lost."""
    return 10.0 + 2 * JOIN_GAP_SECONDS * max(0, members - AT_ONCE)


class Coordinator:
    """The members' states, the round's failures in order of arrival, and the parts that are in storage."""

    def __init__(self, assign: Assign, now: float) -> None:
        self.members = {
            m.replica: MemberState(m.replica, m.instance, assign.round, assign.claim, State.STARTING)
            for m in assign.members
        }
        self._workers = {m.replica: m.workers for m in assign.members}
        self.told = dict(self.members)
        """The same for the operator: a member's state as it was when it last changed, for steps go by too fast for it.
        Another object whenever something in it is other than before."""
        self._failures: dict[str, Failure] = {}
        self._join_seconds = join_seconds(len(assign.members))
        self._give_up_at = {m.replica: now + self._join_seconds for m in assign.members[1:]}
        self._joined: set[str] = set()
        self._settled_at: Optional[float] = None
        self.settled = False
        """Whether the failures say what the cause is; until then the coordinator keeps them to itself."""
        self._published: set[SnapshotId] = set()
        self._parts_changed = False
        """Since it was last asked what can be published."""
        self.ends_at: Optional[int] = None
        """See MemberState; once it is said it stays so."""
        self._differ_since: Optional[float] = None
        """When the members were known to have different last snapshots."""
        self._noticed: dict[str, float] = {}
        self.watchdog = Watchdog(assign.limits)

    def join(self, message: Join, now: float) -> Optional[str]:
        """Why this member may not join; None where it has."""
        state = self.members.get(message.replica)
        if state is None or state.instance != message.instance:
            return f"{message.replica} ({message.instance}) is no member of round {message.round}"
        if state.failure is not None and state.failure.reason == FailureReason.MEMBER_LOST:
            return f"{message.replica} is lost to round {message.round}"
        self._joined.add(message.replica)
        self._give_up_at[message.replica] = now + SILENCE_SECONDS
        return None

    def on_member_state(self, state: MemberState, now: float) -> bool:
        """Take a member's line; false where it brings nothing new."""
        known = self.members.get(state.replica)
        if known is None or (known.instance, known.round, known.claim) != (state.instance, state.round, state.claim):
            return False
        if state.replica in self._give_up_at:
            self._give_up_at[state.replica] = now + SILENCE_SECONDS
        if known.failure is not None and state.failure is None:
            return False  # a lost member stays lost: its round is over
        self.watchdog.on_heartbeats(state.replica, () if state.state in OVER else state.heartbeats, now)
        # What goes on to the operator is what it needs.
        state = dataclasses.replace(state, snapshot_step=None, heartbeats=(), hung=False, leaving=(), ends_at=None)
        self._set(state)
        if state.failure is None:
            return state != known
        self._failures[state.replica] = failures.better(self._failures.get(state.replica), state.failure)
        return self.settle(now) or state != known

    def settle(self, now: float) -> bool:
        """Whether it has just become clear what the round's failure is."""
        if self.settled or not self._failures:
            return False
        if self._settled_at is None:
            self._settled_at = now + SETTLE_SECONDS
        provoked = all(failures.looks_provoked(failure) for failure in self._failures.values())
        self.settled = not provoked or now >= self._settled_at
        return self.settled

    def lost(self, replica: str, detail: str, at: float) -> bool:
        """The member's stream broke or is silent; false where that is no news, or no harm."""
        known = self.members.get(replica)
        if known is None or known.state in OVER:
            return False
        self._fail(known, detail, at)
        return True

    def lost_part(self, replica: str, at: float) -> None:
        """The member is gone, after its last step, with what the end of the run needs of it (decision "No wait for a
        part that went with its member")."""
        if self.members[replica].failure is None:
            self._fail(self.members[replica], "has gone before its part of the last checkpoint was in storage", at)

    def agree_on_the_end(self, now: float, at: float) -> None:
        """Of a script that is through on all members (decision "A script ends with what all ranks have whole"). Who has
        no snapshot that all have has failed."""
        said = [member.saved for member in self.members.values() if member.saved is not None]
        if self.ends_at is not None or len(said) < len(self.members):
            return
        lacking = self.lacking_the_end()
        self._differ_since = (self._differ_since or now) if lacking else None
        if self._differ_since is not None and now < self._differ_since + SILENCE_SECONDS:
            return  # what a worker said last may be read a little after its end
        self.ends_at = max(set.intersection(*map(set, said)), default=None)
        for replica, step in lacking.items() if self.ends_at is None else ():
            detail = f"ended before its snapshot of step {step} was whole: end with commit(step, durable=True)"
            if self.members[replica].failure is None:
                self._fail(self.members[replica], detail, at, FailureReason.WORKER_EXITED_EARLY)

    def lacking_the_end(self) -> dict[str, int]:
        """Members whose script is through and that do not have the newest snapshot that another one has; its step."""
        said = {replica: member.saved for replica, member in self.members.items() if member.saved is not None}
        newest = max((step for saved in said.values() for step in saved), default=0)
        return {replica: newest for replica, saved in said.items() if newest and newest not in saved}

    def _fail(
        self, known: MemberState, detail: str, at: float, reason: FailureReason = FailureReason.MEMBER_LOST
    ) -> None:
        replica = known.replica
        failure = Failure(replica, reason, f"{replica} {detail}.", step=known.step, at=at)
        self._failures.setdefault(replica, failure)
        self._set(dataclasses.replace(known, state=State.FAILED, failure=failure))
        self.settled = True

    def _set(self, state: MemberState) -> None:
        """Of thousands of members each says something twice a second: what follows is looked for where it may."""
        before, told = self.members[state.replica], self.told[state.replica]
        self.members[state.replica] = state
        failure = state.failure and dataclasses.replace(failures.brief(state.failure, len(self.members)), rollback=None)
        if (told.state, told.failure, told.notice) != (state.state, failure, state.notice):
            tells = dataclasses.replace(
                state, failure=failure, durable_parts=(), next_call=None, saved=None, world_mismatch=False
            )
            self.told = {**self.told, state.replica: tells}
        if before.notice != state.notice:
            noticed = {name: member.notice for name, member in self.members.items()}
            self._noticed = {name: grace for name, grace in noticed.items() if grace is not None}
        self._parts_changed |= before.durable_parts != state.durable_parts

    def discount_pause(self, seconds: float) -> None:
        self._give_up_at = {replica: at + seconds for replica, at in self._give_up_at.items()}
        if self._differ_since is not None:
            self._differ_since += seconds

    def overdue(self, now: float) -> list[tuple[str, str]]:
        """(replica, what it did not do) of members whose time is up."""
        never = f"did not join within {self._join_seconds:g} s"
        reasons = {True: f"has been silent for {SILENCE_SECONDS:g} s", False: never}
        late = [replica for replica, at in self._give_up_at.items() if now >= at]
        for replica in late:
            del self._give_up_at[replica]
        return [(replica, reasons[replica in self._joined]) for replica in late]

    def check(self, now: float) -> bool:
        """Whether there is news of a hang. A round that has failed is over; who waits in it does so for that reason."""
        return not self._failures and self.watchdog.check(now)

    def all_train_alone(self) -> bool:
        """Whether every worker of the round trains in a world of its own."""
        return all(member.world_mismatch for member in self.members.values())

    def all_are(self, state: State) -> bool:
        return all(member.state == state for member in self.members.values())

    def gone_unshipped(self, step: Optional[int]) -> list[str]:
        """Members that are gone, and have not told that all their parts of the snapshot at `step` are in storage: each
        worker has one."""
        others = list(self.members.values())[1:]
        return [m.replica for m in others if m.replica not in self._give_up_at and not self._has_shipped(m, step)]

    def _has_shipped(self, member: MemberState, step: Optional[int]) -> bool:
        parts = collections.Counter(
            part.id
            for part in member.durable_parts
            if step is None or part.id.step == step or (part.id.step > step and self.ends_at is None)
        )
        return max(parts.values(), default=0) >= self._workers[member.replica]

    def noticed(self) -> dict[str, float]:
        """Members that were told to go, and their seconds of grace."""
        return self._noticed

    def failures(self) -> tuple[Failure, ...]:
        return failures.told(self._failures.values(), len(self.members)) if self.settled else ()

    def publishable(self) -> list[tuple[SnapshotId, bool]]:
        """Snapshots (with whether the run is complete with it) whose parts are all in storage; each told once."""
        if not self._parts_changed:
            return []
        self._parts_changed = False
        parts: dict[SnapshotId, set[Part]] = {}
        for member in self.members.values():
            for part in member.durable_parts:
                parts.setdefault(part.id, set()).add(part)
        ready = [
            (id, any(part.complete for part in found))
            for id, found in sorted(parts.items(), key=lambda item: item[0].step)
            if id not in self._published and _are_all(found, id.shards)
        ]
        self._published.update(id for id, _ in ready)
        return ready


def _are_all(parts: set[Part], shards: int) -> bool:
    """Whether there is one of each shard, of which a member may name any number."""
    found = {part.shard for part in parts}
    return len(found) == shards and found == set(range(len(found)))
