"""How a round starts here: Prepare ends what ran before and says what this agent has; Assign begins. Pure."""

from __future__ import annotations

from typing import Union

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core.drains import Draining
from concertina_agent.core.lead import JOIN_SECONDS, Lead
from concertina_agent.core.membership import Membership, Preparation
from concertina_agent.core.workers_state import Workers


class Preparing(Draining):
    """An AgentCore from the first Prepare of a round to its workers' start."""

    def _prepare(self, request: int, message: p.Prepare) -> None:
        if not self._is_current_or_higher(message.round, message.claim):
            return self._refuse(request, self._older(message.round))
        known = self._preparation
        if known is None or self.seen != (message.round, message.claim):
            return self._prepare_anew(request, message)
        if known.answer is not None and (known.prepare == message or self._round is not None):
            return self._reply(request, known.answer)
        known.waiting.append(request)
        if known.prepare != message:
            known.prepare, known.reachable, known.answer = message, None, None
            self._effects.append(e.ReachOut(message))
        return None

    def _prepare_anew(self, request: int, message: p.Prepare) -> None:
        abandoned = self._preparation.waiting if self._preparation else []
        self.seen = (message.round, message.claim)
        self._preparation, self._round, self._changed = Preparation(message, [request]), None, True
        for waiting in abandoned:
            self._refuse(waiting, self._older(0))
        self._effects += [
            e.PersistSeen(message.round, message.claim),
            e.KillWorkers(message.round),
            e.BindStore(message.round, message.claim),
            e.ReachOut(message),
        ]
        if self._durability.outdated(message.round):
            self._effects.append(e.LookAtStorage())

    def _assign(self, request: int, message: p.Assign) -> None:
        if (message.round, message.claim) != self.seen:
            return self._refuse(request, self._older(message.round))
        if self._round is not None:
            if self._round.assign == message:
                return self._reply(request, p.Accepted(*self.seen))
            return self._refuse(request, f"round {message.round} has been assigned here in another way")
        if self._preparation is None or not self._preparation.quiet:
            return self._refuse(request, f"round {message.round} is not prepared by this instance of the agent")
        me = next((i for i, m in enumerate(message.members) if m.replica == self.replica), -1)
        self._preparation.left_out = me < 0
        if me < 0 or message.members[me].instance != self.instance:
            return self._refuse(request, f"{self.replica} ({self.instance}) is not a member of round {message.round}")
        self._reply(request, p.Accepted(*self.seen))
        self._begin(message, me)
        return None

    def _begin(self, message: p.Assign, me: int) -> None:
        mine = message.members[me]
        ranks = tuple(range(mine.first_rank, mine.first_rank + mine.workers))
        lead = Lead(message, self._now) if me == 0 else None
        self._durability.new_round(message.round, message.restore.all_undone)
        self._round = Membership(message, me, Workers(ranks, self._bundled), lead, self._now + JOIN_SECONDS)
        restore, held = message.restore, self._holdings
        if unneeded := held.keep(message.round, restore.id, held.before(message.round, restore)):
            self._effects.append(e.DropSnapshots(unneeded))
        if lead is not None:
            self._undo(message.restore.all_undone)
        self._effects.append(e.StartRound(message, me))
        if self._bundled and not self._round.lonely:
            before = message.members[me - 1]
            shards = tuple(range(before.first_rank, before.first_rank + before.workers))
            self._effects.append(e.CopyFrom(message.round, before, shards))
        self._own_state_changed()

    def _undo(self, undone: tuple[p.Undone, ...]) -> None:
        if self._durability.storage is not None:
            self._durability.undone += tuple(some for some in undone if some not in self._durability.undone)
            self._effects += map(e.Undo, undone)

    def _workers_gone(self, event: e.WorkersGone) -> None:
        if event.round == self.seen[0] and self._preparation is not None and not self._preparation.gone:
            if event.held is not None:
                self._holdings.replace(event.held)
            self._preparation.gone = True
            self._answer_when_ready()

    def _store_bound(self, event: e.StoreBound) -> None:
        if (event.round, event.claim) == self.seen and self._preparation is not None:
            self._preparation.store = event.address
            self._answer_when_ready()

    def _reached(self, event: e.Reached) -> None:
        if self._preparation is not None and event.prepare == self._preparation.prepare:
            self._preparation.reachable = event.replicas
            self._answer_when_ready()

    def _answer_when_ready(self) -> None:
        known = self._preparation
        if known is None or not known.quiet or known.reachable is None or known.answer is not None:
            return
        known.answer = p.Prepared(
            self.replica,
            self.instance,
            *self.seen,
            self._slots,
            known.store,
            known.reachable,
            self.held,
            self._durability.storage,
        )
        for request in known.waiting:
            self._reply(request, known.answer)
        known.waiting.clear()

    def _reply(self, request: int, message: Union[p.Prepared, p.Accepted, p.Refused]) -> None:
        self._effects.append(e.Reply(request, message))

    def _refuse(self, request: int, reason: str) -> None:
        self._reply(request, p.Refused(reason, *self.seen))
