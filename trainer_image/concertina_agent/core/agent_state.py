"""Facts that an agent knows, and what follows from them: its state, its report, and whether it may exit.

The module has no side effects. Only the steps change the facts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Optional

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core.round.coordinator import Coordinator
from concertina_agent.core.round.failures import whole
from concertina_agent.core.round.membership import Membership, Notice, Preparation
from concertina_agent.core.snapshot_index import SnapshotIndex
from concertina_agent.core.states import OVER, OwnState
from concertina_agent.core.upload_state import UploadState


class AgentState:
    """Facts that an agent knows, in independent parts."""

    def __init__(
        self,
        replica: str,
        uid: str,
        instance: str,
        workers: int,
        *,
        bundled: bool,
        storage: Optional[p.Storage] = None,
        storage_named: bool = False,
        seen: tuple[int, str] = (0, ""),
        held: Iterable[p.HeldSnapshot] = (),
    ) -> None:
        """Initialize the state of a new agent.

        Args:
            replica: Name of the replica.
            uid: UID of the job.
            instance: Random id of this start of the agent.
            workers: Number of workers of this replica.
            bundled: Whether the bundled trainer runs, and not a user's own command.
            storage: State of durable storage, or None if it is not used.
            storage_named: Whether the job specifies storage that a user's own command may start to use.
            seen: Highest round and claim that the volume contains.
            held: Snapshots that the volume contains.
        """
        self.replica, self.uid, self.instance = replica, uid, instance
        self.workers_here, self.bundled = workers, bundled
        self.seen = seen
        """Highest round and claim ever seen."""
        self.snapshots, self.uploads = SnapshotIndex(held), UploadState(storage, is_named=storage_named)
        self.ready, self.learning, self.startup_error = False, False, ""
        self.warm_start = e.WarmStartKnown()
        self.tracking = ""
        """Reason why the tracker does not accept records, or empty."""
        self.preparation: Optional[Preparation] = None
        self.round: Optional[Membership] = None
        """Round that runs here, or has ended here."""
        self.notice: Optional[Notice] = None
        self.last_event: Optional[e.Moment] = None

    # --- its state --------------------------------------------------------------------------------------------------

    @property
    def state(self) -> OwnState:
        """State of this agent on its own (see `states`)."""
        r = self.round
        if r is None:
            if self.preparation is None:
                return OwnState.IDLE
            return OwnState.PREPARED if self.preparation.quiet else OwnState.PREPARING
        if r.failure is not None:
            return OwnState.FAILED
        if r.workers.all_over():
            if r.workers.all_complete():
                return OwnState.SUCCEEDED
            if r.peer_has_all(self.snapshots) or (r.drain is not None and r.drain.grace_over):
                return OwnState.DRAINED
        if r.drain is not None or self.notice is not None:
            return OwnState.DRAINING
        return OwnState.RUNNING if r.workers.all_started() else OwnState.STARTING

    @property
    def reported(self) -> OwnState:
        """State as in Report.

        Starting is reported as running. A coordinator's end is the end of the whole round: every member has ended, and
        the checkpoint that this end requires is in storage. A failure is reported once its cause is known.
        """
        own, r = self.state, self.round
        if r is None or r.coordinator is None or own not in OVER:
            return OwnState.RUNNING if own is OwnState.STARTING else own
        if own is OwnState.FAILED:
            return own if r.coordinator.settled else OwnState.RUNNING
        if r.coordinator.all_are(own.on_wire) and self.is_durable(r, r.coordinator, own):
            return own
        return OwnState.DRAINING if r.drain is not None else OwnState.RUNNING

    def is_durable(self, r: Membership, coordinator: Coordinator, own: OwnState) -> bool:
        """Return whether storage has the checkpoint that the end of this round requires, or can no longer receive it.

        The latter is possible only after a drain.
        """
        durable_drain, step = r.drain is not None and r.drain.order.durable, self.last_step(r)
        if own is OwnState.DRAINED and (not durable_drain or coordinator.gone_unshipped(step)):
            return True
        if self.bundled:
            return self.uploads.has(self.uid, step, complete=own is OwnState.SUCCEEDED)
        nothing = not r.last and not coordinator.lacking_the_end()
        return nothing or self.uploads.has(self.uid, step, complete=False)

    def last_step(self, r: Membership) -> Optional[int]:
        """Return the step that the end of this round requires in storage, or None.

        Only the end of a script shows which of its steps is the last one. Its last saved state must be in storage on
        all ranks (`ends_at`).
        """
        if r.ends_at is not None:
            return r.ends_at
        saved = [] if self.bundled else [last.id.step for last in r.last.values()]
        return max(saved, default=r.workers.step)

    # --- what it says -----------------------------------------------------------------------------------------------

    def member_state(self) -> p.MemberState:
        """Return this agent's state as a member of its round, which it sends to its coordinator."""
        r = self.round
        if r is None:
            return p.MemberState(self.replica, self.instance, *self.seen, state=p.State.STARTING)
        return p.MemberState(
            self.replica,
            self.instance,
            *self.seen,
            state=self.state.on_wire,
            step=r.workers.step,
            failure=r.failure,
            notice=self.notice.grace if self.notice else None,
            leaving=self.leaving(),
            snapshot_step=r.workers.progress.snapshot_step if r.workers.progress else None,
            durable_parts=self.uploads.parts,
            heartbeats=r.hearts.heartbeats,
            hung=r.coordinator is not None and r.coordinator.watchdog.hung,
            next_call=r.stopping.next_call,
            saved=r.saved_by_all() if not self.bundled and r.workers.all_complete() else None,
            ends_at=r.ends_at if r.coordinator is not None else None,
            world_mismatch=bool(r.world_mismatch),
        )

    def beat(self) -> p.MemberState:
        """Return the heartbeat that a coordinator sends to its members.

        It is equal to member_state(), but succeeded and drained apply to the whole round.
        """
        state = self.member_state()
        if state.state not in (p.State.SUCCEEDED, p.State.DRAINED):
            return state
        return dataclasses.replace(state, state=self.reported.on_wire)

    def report(self) -> p.Report:
        """Return everything that this agent knows, which Watch streams."""
        r, reported = self.round, self.reported
        coordinator = r.coordinator if r else None
        return p.Report(
            replica=self.replica,
            instance=self.instance,
            ready=self.ready and not self.learning,
            round=self.seen[0],
            claim=self.seen[1],
            state=reported.on_wire,
            coordinator=coordinator is not None,
            members=coordinator.told if coordinator else {},
            failures=coordinator.failures() if coordinator else ((whole(r.failure),) if r and r.failure else ()),
            progress=r.workers.progress if r else None,
            hang=coordinator.watchdog.hang if coordinator else None,
            stragglers=coordinator.watchdog.stragglers.found if coordinator else (),
            storage=self.uploads.storage,
            startup_error=self.startup_error,
            warm_start_disabled_reason=self.warm_start.warm_start_disabled_reason,
            warm_start_skipped_modules=self.warm_start.warm_start_skipped_modules,
            notice=self.notice.grace if self.notice else None,
            busy=coordinator.watchdog.busy if coordinator else None,
            takes_calls=True,
            tracking=self.tracking,
            keeps_state=r is not None and r.workers.keep_state,
            world_mismatch=r.world_mismatch
            if r and coordinator and r.world_mismatch and coordinator.all_train_alone()
            else "",
        )

    @property
    def held(self) -> tuple[p.HeldSnapshot, ...]:
        """Snapshots that this agent holds, newest first."""
        return self.snapshots.all()

    @property
    def latest(self) -> Optional[p.Durable]:
        """Checkpoint that LATEST names, unless it was undone."""
        return self.uploads.latest

    # --- whether it may go ------------------------------------------------------------------------------------------

    def at_rest(self) -> bool:
        """Return whether nothing would be lost if this agent exited now.

        Its state may be needed by a later round: if it is prepared and not released, or if its neighbour in the ring of
        copies leaves too, unless the state is in storage.
        """
        r = self.round
        if r is None:
            prepared = self.preparation
            return prepared is None or prepared.released or not self.held
        if r.workers.keep_state and r.failure is None and self._is_last_holder(r):
            return False
        copied = r.failure is not None or r.peer_has_all(self.snapshots)
        coordinated = r.coordinator is None or not r.workers.keep_state or self.reported in OVER
        return r.workers.all_over() and self.uploads.all_shipped and copied and coordinated

    def leaving(self) -> tuple[str, ...]:
        """Return the members that have to leave, as the coordinator knows or its heartbeats say."""
        r = self.round
        if r is None:
            return ()
        return tuple(r.coordinator.noticed()) if r.coordinator is not None else r.leaving

    def _is_last_holder(self, r: Membership) -> bool:
        """Return whether this agent may be the last holder of a state.

        The result is also True if the coordinator has not yet reported the other leaving members, because notices come
        in groups.
        """
        names = [member.replica for member in r.assign.members]
        leaving, durable = set(self.leaving()), r.drain is not None and r.drain.order.durable
        if durable and self.uploads.storage is not None:
            return False
        if leaving.issuperset(names):
            return durable
        if self.replica not in leaving:
            return not r.coordinator_gone
        return bool(leaving & {names[r.me - 1], names[(r.me + 1) % len(names)]} - {self.replica})

    def all_succeeded(self) -> bool:
        """Return whether the whole round has succeeded, which exit code 0 tells the operator.

        On a member, return whether its coordinator has reported success.
        """
        r = self.round
        is_outcome_known = r is not None and (r.coordinator is not None or r.succeeded_at is not None)
        return is_outcome_known and self.reported is OwnState.SUCCEEDED

    # --- whose word counts ------------------------------------------------------------------------------------------

    def current(self, round: int) -> Optional[Membership]:
        """Return the round in progress at this agent, if it has this number."""
        return self.round if round == self.seen[0] else None

    def is_current_or_higher(self, round: int, claim: str) -> bool:
        return round > self.seen[0] or (round, claim) == self.seen

    def accept(self, request: int) -> e.Reply:
        return e.Reply(request, p.Accepted(*self.seen))

    def refuse(self, request: int, reason: str) -> e.Reply:
        return e.Reply(request, p.Refused(reason, *self.seen))

    def refuse_older(self, request: int, round: int) -> e.Reply:
        """Refuse a request that is not of the highest round and claim."""
        highest = f"{self.seen[0]} ({self.seen[1]})"
        return self.refuse(request, f"round {round} under this claim is not the highest seen here: {highest}")
