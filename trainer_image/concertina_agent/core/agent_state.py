"""What an agent knows, and what follows from it for its reports. Pure; `rounds` is what changes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Optional

import concertina_protocol as p
from concertina_agent.core.durability import Durability
from concertina_agent.core.holdings import Holdings
from concertina_agent.core.lead import OVER, Lead
from concertina_agent.core.membership import Membership, Notice, Preparation

ENDS = ("drained", "succeeded")
"""Of a lead they are said only when they are true of its whole round."""


class AgentState:
    """Everything an agent knows, and what it says of itself."""

    def __init__(
        self,
        replica: str,
        uid: str,
        instance: str,
        workers: int,
        *,
        bundled: bool,
        storage: Optional[p.Storage] = None,
        seen: tuple[int, str] = (0, ""),
        held: Iterable[p.Held] = (),
    ) -> None:
        """`instance`: random, per start of the agent. `storage`: None without durable storage (or not `bundled`)."""
        self.replica, self.uid, self.instance = replica, uid, instance
        self.seen = seen
        self._slots, self._bundled = workers, bundled
        self._holdings, self._durability = Holdings(held), Durability(storage)
        self._ready, self._startup_error = False, ""
        self._preparation: Optional[Preparation] = None
        self._round: Optional[Membership] = None
        self._notice: Optional[Notice] = None

    def state(self) -> p.MemberState:
        """This agent as a member of its round."""
        r = self._round
        if r is None:
            return p.MemberState(self.replica, self.instance, *self.seen, state=p.State.STARTING)
        return p.MemberState(
            self.replica,
            self.instance,
            *self.seen,
            state=p.State(self._own_state()),
            step=r.workers.step,
            failure=r.failure,
            notice=self._notice.grace if self._notice else 0.0,
            leaving=self._leaving(),
            snapshot_step=r.workers.progress.snapshot_step if r.workers.progress else -1,
            durable_parts=self._durability.parts,
            pulses=r.hearts.pulses,
            hung=r.lead is not None and r.lead.watchdog.hung,
            next_call=r.stopping.next_call,
        )

    def beat(self) -> p.MemberState:
        """What a lead tells its members: as state(), but succeeded and drained stand for the whole round."""
        state = self.state()
        return dataclasses.replace(state, state=p.State(self._reported_state())) if state.state in ENDS else state

    def report(self) -> p.Report:
        """All that this agent knows."""
        r = self._round
        lead = r.lead if r else None
        return p.Report(
            replica=self.replica,
            instance=self.instance,
            ready=self._ready,
            round=self.seen[0],
            claim=self.seen[1],
            state=p.State(self._reported_state()),
            lead=lead is not None,
            members=dict(lead.members) if lead else {},
            failures=lead.failures() if lead else ((r.failure,) if r and r.failure else ()),
            progress=r.workers.progress if r else None,
            hang=lead.watchdog.hang if lead else None,
            stragglers=lead.watchdog.stragglers.found if lead else (),
            storage=self._durability.storage,
            startup_error=self._startup_error,
            notice=self._notice.grace if self._notice else 0.0,
        )

    @property
    def held(self) -> tuple[p.Held, ...]:
        """Newest first."""
        return self._holdings.all()

    @property
    def latest(self) -> Optional[p.Durable]:
        """What LATEST names, unless it was undone."""
        return self._durability.latest

    @property
    def world(self) -> Optional[p.Assign]:
        """The round that runs here, or has ended here."""
        return self._round.assign if self._round else None

    def _own_state(self) -> str:
        """As in MemberState."""
        return self._round.state(self._notice is not None, self._holdings) if self._round else "starting"

    def _reported_state(self) -> str:
        """As in Report: a lead's end is the end of the whole round."""
        r, own = self._round, self._own_state()
        if r is None:
            return "idle" if self._preparation is None else "prepared"
        if own == "starting" or (own == "failed" and r.lead is not None and not r.lead.settled):
            return "running"
        if r.lead is None or own not in ENDS or (r.lead.all_are(own) and self._is_durable(r, r.lead, own)):
            return own
        return "draining" if r.drain is not None else "running"

    def _is_durable(self, r: Membership, lead: Lead, own: str) -> bool:
        """What the end of this round asks of durable storage is there; or, after a drain, can't get there any more."""
        if own == "drained" and (not (r.drain and r.drain.durable) or lead.gone_unshipped(r.workers.step)):
            return True
        return self._durability.has(self.uid, r.workers.step, complete=own == "succeeded")

    def _at_rest(self) -> bool:
        """Nothing would be lost if this agent went now.

        What it holds may be needed by a round to come: that of one that is prepared; and that of one whose neighbour in
        the ring of copies leaves too, unless it is in storage."""
        r = self._round
        if r is None:
            prepared = self._preparation
            return prepared is None or prepared.left_out or not self.held
        if self._bundled and r.failure is None and self._is_last_holder(r):
            return False
        copied = r.failure is not None or r.peer_has_all(self._holdings)
        led = r.lead is None or not self._bundled or self._reported_state() in OVER
        return r.workers.all_over() and self._durability.all_shipped and copied and led

    def _leaving(self) -> tuple[str, ...]:
        """As far as known here: the lead itself, or what its beats say."""
        r = self._round
        if r is None:
            return ()
        return tuple(member.replica for member in r.lead.noticed()) if r.lead is not None else r.leaving

    def _is_last_holder(self, r: Membership) -> bool:
        """Also where the lead has not said yet who leaves besides this one: notices come in groups."""
        names = [member.replica for member in r.assign.members]
        leaving, durable = set(self._leaving()), r.drain is not None and r.drain.durable
        if durable and self._durability.storage is not None:
            return False
        if leaving.issuperset(names):
            return durable
        if self.replica not in leaving:
            return not r.lead_gone
        return bool(leaving & {names[r.me - 1], names[(r.me + 1) % len(names)]} - {self.replica})

    def _current(self, round: int) -> Optional[Membership]:
        """The round in progress here, if it is this one."""
        return self._round if round == self.seen[0] else None

    def _is_current_or_higher(self, round: int, claim: str) -> bool:
        return round > self.seen[0] or (round, claim) == self.seen

    def _older(self, round: int) -> str:
        return f"round {round} under this claim is not the highest seen here: {self.seen[0]} ({self.seen[1]})"
