"""Facts that an agent knows, and values derived from them: its state, its report, and whether it may exit.

The module has no side effects. Only the functions in `steps` change the facts.
"""

from __future__ import annotations

import dataclasses
import math
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
    """Facts that an agent knows about itself, its round and storage."""

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
        preflight: bool = False,
    ) -> None:
        """Initialize the state of an agent that has just started.

        Args:
            replica: Name of the replica.
            uid: UID of the job.
            instance: Random id of this start of the agent.
            workers: Number of workers of this replica.
            bundled: Whether the bundled trainer runs, and not a user's own command.
            storage: State of durable storage, or None if the job does not use durable storage.
            storage_named: Whether the job specifies storage that a user's own command may start to use.
            seen: Highest round and claim that the volume contains.
            held: Snapshots that the volume contains.
            preflight: Whether a preflight of the GPUs is about to begin.
        """
        self.replica, self.uid, self.instance = replica, uid, instance
        self.workers_here, self.bundled = workers, bundled
        self.seen = seen
        """Highest round that this agent has ever seen, and its claim."""
        self.snapshots, self.uploads = SnapshotIndex(held), UploadState(storage, is_named=storage_named)
        self.ready, self.learning, self.startup_error = False, False, ""
        self.warm_start = e.WarmStartKnown()
        self.gpu_fault = ""
        """Part of a sentence that describes the first GPU fault of this replica, or "" if there was none."""
        self.preflight = preflight
        """True until the preflight has ended without a fault. Until then, the agent is not ready."""
        self.preflight_failed = False
        self.tracking = ""
        """Reason why the tracking tool does not accept records, or "" if it accepts them."""
        self.preparation: Optional[Preparation] = None
        self.round: Optional[Membership] = None
        """Membership in the present or last round of this agent, or None before its first round."""
        self.notice: Optional[Notice] = None
        self.last_event: Optional[e.Moment] = None

    # --- state of this agent ----------------------------------------------------------------------------------------

    @property
    def state(self) -> OwnState:
        """State of this agent's own part in its round, such as running or failed (see `states`).

        Unlike `reported`, this value does not depend on the states of other members.
        """
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
        """State of this agent in its Report to the operator. On a coordinator, it is the state of the whole round.

        The state `starting` is reported as `running`. A coordinator reports the end of a round only when every member
        has ended and the checkpoint that this end requires is in storage. A coordinator reports a failure only when the
        failure's cause is known.

        The coordinator is the agent of rank 0.
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
        """Return whether this round can end now, without a further wait for a checkpoint in storage.

        If the end requires a checkpoint, the wait is over once storage has that checkpoint. After a drain, in which all
        ranks stopped after the same step, the wait is also over if a member is lost whose shards are not all in
        storage, because the checkpoint can then never be complete.
        """
        durable_drain, step = r.drain is not None and r.drain.order.durable, self.last_step(r)
        if own is OwnState.DRAINED and (not durable_drain or coordinator.gone_unshipped(step)):
            return True
        if self.bundled:
            return self.uploads.has(self.uid, step, complete=own is OwnState.SUCCEEDED)
        nothing = not r.last and not coordinator.lacking_the_end()
        return nothing or self.uploads.has(self.uid, step, complete=False)

    def last_step(self, r: Membership) -> Optional[int]:
        """Return the step whose state must be in storage when this round ends, or None.

        A script does not say in advance which step is its last one. When a script has ended, the last step is the
        newest step that all ranks have saved (`ends_at`).
        """
        if r.ends_at is not None:
            return r.ends_at
        saved = [] if self.bundled else [last.id.step for last in r.last.values()]
        return max(saved, default=r.workers.step)

    # --- messages of this agent -------------------------------------------------------------------------------------

    def member_state(self) -> p.MemberState:
        """Return the state that this agent, as a member of its round, sends to the coordinator."""
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
            gpu_fault=self.gpu_fault,
        )

    def beat(self) -> p.MemberState:
        """Return the heartbeat that this agent, as the coordinator (the agent of rank 0), sends to its members.

        In a drain, all ranks stop after the same step. The heartbeat is the result of `member_state`, with one
        exception: the states succeeded and drained are sent only if they apply to all members of the round.
        """
        state = self.member_state()
        if state.state not in (p.State.SUCCEEDED, p.State.DRAINED):
            return state
        return dataclasses.replace(state, state=self.reported.on_wire)

    def report(self) -> p.Report:
        """Return the state of this agent and of its workers, as the agent reports it to the operator."""
        r, reported = self.round, self.reported
        coordinator = r.coordinator if r else None
        return p.Report(
            replica=self.replica,
            instance=self.instance,
            ready=self.can_start,
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
            gpu_fault=self.gpu_fault,
            preflight_failed=self.preflight_failed,
            tracking=self.tracking,
            keeps_state=r is not None and r.workers.keep_state,
            world_mismatch=r.world_mismatch
            if r and coordinator and r.world_mismatch and coordinator.all_train_alone()
            else "",
        )

    @property
    def can_start(self) -> bool:
        """Return whether this agent can start workers at once: their modules are imported and the GPUs are checked."""
        return self.ready and not self.learning and not self.preflight

    @property
    def held(self) -> tuple[p.HeldSnapshot, ...]:
        """Snapshots whose shards are in the volume of this agent, newest first."""
        return self.snapshots.all()

    @property
    def latest(self) -> Optional[p.Durable]:
        """Checkpoint that the file LATEST in storage names, or None if a rollback has undone that checkpoint."""
        return self.uploads.latest

    def next_deadline(self, now: float) -> float:
        """Return the time after `now` at which this agent must check whether another agent is silent, or infinity."""
        r = self.round
        if r is None:
            return math.inf
        if r.coordinator is not None:
            return r.coordinator.next_deadline(now)
        return r.silent_at if r.silent_at > now else math.inf

    # --- exit of this agent -----------------------------------------------------------------------------------------

    def at_rest(self) -> bool:
        """Return whether this agent can exit without losing a state that a later round may need.

        If the state is not in storage, the agent must not exit in these cases:

        - The agent has reported its snapshots for a new round, and the operator has not sent a Release yet.
        - The replica that keeps copies of the agent's state is about to exit too.
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
        """Return the members that have a termination notice and must depart.

        The coordinator is the agent of rank 0. The coordinator knows about the notices from each member's state. Other
        members know about them from the coordinator's heartbeats.
        """
        r = self.round
        if r is None:
            return ()
        return tuple(r.coordinator.noticed()) if r.coordinator is not None else r.leaving

    def _is_last_holder(self, r: Membership) -> bool:
        """Return whether this agent may be the only remaining agent with the training state of its workers' shards.

        Such an agent must not exit yet. Several replicas often get termination notices at the same time. The result is
        therefore True until the coordinator has reported which other members depart.

        The coordinator is the agent of rank 0.
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
        """Return whether the coordinator (the agent of rank 0) has reported that the whole round has succeeded.

        All agents of the round then exit with code 0.
        """
        r = self.round
        is_outcome_known = r is not None and (r.coordinator is not None or r.succeeded_at is not None)
        return is_outcome_known and self.reported is OwnState.SUCCEEDED

    # --- validity of requests ---------------------------------------------------------------------------------------

    def current(self, round: int) -> Optional[Membership]:
        """Return the membership in the round number `round` if this round is in progress here, otherwise None."""
        return self.round if round == self.seen[0] else None

    def is_current_or_higher(self, round: int, claim: str) -> bool:
        return round > self.seen[0] or (round, claim) == self.seen

    def accept(self, request: int) -> e.Reply:
        return e.Reply(request, p.Accepted(*self.seen))

    def refuse(self, request: int, reason: str) -> e.Reply:
        return e.Reply(request, p.Refused(reason, *self.seen))

    def refuse_older(self, request: int, round: int) -> e.Reply:
        """Return the Reply that refuses a request for an outdated round.

        A request is outdated if this agent has seen a request for a later round, or for the same round with another
        claim. A claim is the operator's decision to begin a round.
        """
        highest = f"{self.seen[0]} ({self.seen[1]})"
        return self.refuse(request, f"round {round} under this claim is not the highest seen here: {highest}")
