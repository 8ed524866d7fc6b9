"""What an agent knows, and what follows from it: its state, what it reports, whether it may go. Pure; only the steps
change it."""

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
    """The facts, in parts that stand alone."""

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
        """`instance`: random, per start of the agent. `storage`: None without durable storage; `storage_named`: until a
        command of one's own uses it."""
        self.replica, self.uid, self.instance = replica, uid, instance
        self.workers_here, self.bundled = workers, bundled
        self.seen = seen
        """The highest round and claim ever seen."""
        self.snapshots, self.uploads = SnapshotIndex(held), UploadState(storage, is_named=storage_named)
        self.ready, self.learning, self.startup_error = False, False, ""
        self.warm_start = e.WarmStartKnown()
        self.tracking = ""
        """Why the tracker does not take what is to be tracked."""
        self.preparation: Optional[Preparation] = None
        self.round: Optional[Membership] = None
        """The round that runs here, or has ended here."""
        self.notice: Optional[Notice] = None
        self.last_event: Optional[e.Moment] = None

    # --- its state --------------------------------------------------------------------------------------------------

    @property
    def state(self) -> OwnState:
        """Of this agent by itself; see `states`."""
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
        """As in Report: starting is running, and a coordinator's end is the end of the whole round: every member's,
        with the checkpoint that this end asks for in storage; and a failure is one once its cause is known."""
        own, r = self.state, self.round
        if r is None or r.coordinator is None or own not in OVER:
            return OwnState.RUNNING if own is OwnState.STARTING else own
        if own is OwnState.FAILED:
            return own if r.coordinator.settled else OwnState.RUNNING
        if r.coordinator.all_are(own.on_wire) and self.is_durable(r, r.coordinator, own):
            return own
        return OwnState.DRAINING if r.drain is not None else OwnState.RUNNING

    def is_durable(self, r: Membership, coordinator: Coordinator, own: OwnState) -> bool:
        """What the end of this round asks of durable storage is there; or, after a drain, can't get there any more."""
        durable_drain, step = r.drain is not None and r.drain.order.durable, self.last_step(r)
        if own is OwnState.DRAINED and (not durable_drain or coordinator.gone_unshipped(step)):
            return True
        if self.bundled:
            return self.uploads.has(self.uid, step, complete=own is OwnState.SUCCEEDED)
        nothing = not r.last and not coordinator.lacking_the_end()
        return nothing or self.uploads.has(self.uid, step, complete=False)

    def last_step(self, r: Membership) -> Optional[int]:
        """That the end of this round asks for in storage. Which of a script's steps is its last one, only its end says:
        what it saved last is to be there, on all ranks (`ends_at`)."""
        if r.ends_at is not None:
            return r.ends_at
        saved = [] if self.bundled else [last.id.step for last in r.last.values()]
        return max(saved, default=r.workers.step)

    # --- what it says -----------------------------------------------------------------------------------------------

    def member_state(self) -> p.MemberState:
        """This agent as a member of its round: what it tells its coordinator."""
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
        """Return what a coordinator tells its members.

        It is as member_state(), but succeeded and drained stand for the whole round.
        """
        state = self.member_state()
        if state.state not in (p.State.SUCCEEDED, p.State.DRAINED):
            return state
        return dataclasses.replace(state, state=self.reported.on_wire)

    def report(self) -> p.Report:
        """All that this agent knows: what Watch streams."""
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
        """Newest first."""
        return self.snapshots.all()

    @property
    def latest(self) -> Optional[p.Durable]:
        """What LATEST names, unless it was undone."""
        return self.uploads.latest

    # --- whether it may go ------------------------------------------------------------------------------------------

    def at_rest(self) -> bool:
        """Nothing would be lost if this agent went now.

        What it holds may be needed by a round to come: that of one that is prepared; and that of one whose neighbour in
        the ring of copies leaves too, unless it is in storage."""
        r = self.round
        if r is None:
            prepared = self.preparation
            return prepared is None or prepared.left_out or not self.held
        if r.workers.keep_state and r.failure is None and self._is_last_holder(r):
            return False
        copied = r.failure is not None or r.peer_has_all(self.snapshots)
        coordinated = r.coordinator is None or not r.workers.keep_state or self.reported in OVER
        return r.workers.all_over() and self.uploads.all_shipped and copied and coordinated

    def leaving(self) -> tuple[str, ...]:
        """Members that have to go, as far as known here: the coordinator itself, or what its beats say."""
        r = self.round
        if r is None:
            return ()
        return tuple(r.coordinator.noticed()) if r.coordinator is not None else r.leaving

    def _is_last_holder(self, r: Membership) -> bool:
        """Also where the coordinator has not said yet who leaves besides this one: notices come in groups."""
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
        """Say whether the whole round has succeeded, which exit code 0 tells the operator.

        For a member, say whether its coordinator has.
        """
        r = self.round
        known = r is not None and (r.coordinator is not None or r.succeeded_at is not None)
        return known and self.reported is OwnState.SUCCEEDED

    # --- whose word counts ------------------------------------------------------------------------------------------

    def current(self, round: int) -> Optional[Membership]:
        """The round in progress here, if it is this one."""
        return self.round if round == self.seen[0] else None

    def is_current_or_higher(self, round: int, claim: str) -> bool:
        return round > self.seen[0] or (round, claim) == self.seen

    def accept(self, request: int) -> e.Reply:
        return e.Reply(request, p.Accepted(*self.seen))

    def refuse(self, request: int, reason: str) -> e.Reply:
        return e.Reply(request, p.Refused(reason, *self.seen))

    def refuse_older(self, request: int, round: int) -> e.Reply:
        """What is asked is not of the highest round and claim."""
        highest = f"{self.seen[0]} ({self.seen[1]})"
        return self.refuse(request, f"round {round} under this claim is not the highest seen here: {highest}")
