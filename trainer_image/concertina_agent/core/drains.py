"""How a round is drained: on the operator's word, or on the lead's own where members were told to go. Pure."""

from __future__ import annotations

import dataclasses
import signal
from typing import Optional

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core.agent_state import AgentState
from concertina_agent.core.lead import Lead
from concertina_agent.core.membership import Membership, Notice
from concertina_protocol import worker_channel as w

EXIT_NOTICED = 128 + signal.SIGTERM
OF_COMMANDS = frozenset({"WorkerFailed", "WorkerSignaled", "WorkerExitedEarly"})
LEAST_GRACE = 0.1
"""Seconds; a notice without any grace is one still."""


class Draining(AgentState):
    """An AgentState with what a drain and a notice change in it."""

    _now = _at = 0.0
    _changed = False
    _effects: list[e.Effect]

    def _own_state_changed(self) -> None:
        self._changed = True
        if self._round is not None and self._round.lead is not None:
            self._round.lead.said(self.state(), self._now)
            self._publish(self._round.lead)
            self._agree_where_to_stop(self._round, self._round.lead)

    def _publish(self, lead: Lead) -> None:
        self._effects += [e.Publish(id, complete) for id, complete in lead.publishable()]

    def _begin_drain(self, r: Membership, message: p.Drain) -> None:
        r.drain, r.drain_until = message, self._now + message.grace_seconds
        if not self._bundled:
            self._effects += r.stopping.ask(self._now)
        elif r.workers.alive(0):
            self._effects.append(e.ToWorker(0, w.DrainRequest(message.durable)))
        self._ship_last(r)
        self._own_state_changed()

    def _agree_where_to_stop(self, r: Optional[Membership], lead: Lead) -> None:
        call = r.stopping.decide(lead.members.values(), self._now) if r is not None else None
        if r is not None and call is not None:
            self._effects += [e.ToMembers(p.StopAt(call)), *r.stopping.stop_at(call)]

    def _ship_last(self, r: Membership) -> None:
        """A worker that had stopped before it was asked for a checkpoint: its last snapshot is one."""
        if r.drain is None or not r.drain.durable or self._durability.storage is None:
            return
        for rank, last in r.last.items():
            if r.workers.drained(rank) and not self._durability.is_wanted(last.id, rank):
                self._durability.wanted(w.WantDurable(last.id, rank, last.path, complete=False))
                self._effects.append(e.Ship(last.id, rank, last.path, is_slot=True))

    def _noticed(self, event: e.Noticed) -> None:
        if self._notice is not None:
            return
        self._notice = Notice(self._now, max(event.grace, LEAST_GRACE))
        if self._bundled and self._round is not None and self._round.failure:
            self._effects.append(e.SignalWorkers(signal.SIGKILL))
        self._own_state_changed()
        self._drain_for_notices()

    def _drain_for_notices(self) -> None:
        """The lead does not wait for the operator, which may be away. Where all are to go, what they hold is saved."""
        r = self._round
        if r is None or r.lead is None or not (noticed := r.lead.noticed()):
            return
        durable = len(noticed) == len(r.lead.members) and self._durability.storage is not None
        if r.drain is not None and (r.drain.durable or not durable):
            return
        if r.lead.all_are("succeeded") or r.failure is not None:
            return
        names = ", ".join(member.replica for member in noticed[:5])
        grace = min(member.notice for member in noticed)
        round, claim = self.seen
        drain = p.Drain(
            self.uid, round, claim, f"{names} must leave", durable, max(1.0, grace - r.workers.save_seconds)
        )
        self._effects.append(e.ToMembers(drain))
        self._begin_drain(r, drain)

    def _drain_alone(self, r: Membership) -> None:
        """A command of one's own whose lead says nothing gets SIGTERM and what is left of its grace."""
        notice = self._notice
        if self._bundled or notice is None or r.drain is not None or self._now < notice.patient_until:
            return
        self._begin_drain(r, p.Drain(self.uid, *self.seen, "the lead is silent", False, notice.until - self._now))
        self._effects += r.stopping.stop_at(0)

    def _told(self, state: p.MemberState) -> p.MemberState:
        """A command of one's own that lost a peer to a drain before it heard of it has not failed."""
        r, failure = self._round, state.failure
        if self._bundled or r is None or r.drain is None or failure is None or failure.reason not in OF_COMMANDS:
            return state
        return dataclasses.replace(state, state=p.State.DRAINED, failure=None)

    def _leave_if_noticed(self) -> None:
        notice = self._notice
        if notice is not None and (self._at_rest() or self._now >= notice.until):
            self._effects.append(e.Exit(0 if self._all_succeeded() else EXIT_NOTICED))

    def _all_succeeded(self) -> bool:
        """Whether the round has, as a whole: exit code 0 says that to the operator. Of a member, that its lead has."""
        r = self._round
        known = r is not None and (r.lead is not None or r.succeeded_at is not None)
        return known and self._reported_state() == "succeeded"
