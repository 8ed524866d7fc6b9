"""Where the workers of a command of one's own stop, when its script asks `trainingjob.should_checkpoint()`. Pure.

Every rank asks once a step, so the number of its calls is a clock that all ranks share. At a drain each agent asks its
workers how many calls they have passed; from that answer on a worker waits at its next call. The coordinator names the
highest number plus one: nobody has passed that call, everybody reaches it, and there should_checkpoint() is true. No
collective is needed, and none can hang (decision "A script's ranks agree by counting calls").

Where no worker asks at all (call 0), the command gets SIGTERM and its grace. Not so where its state is to be saved and
only node memory has it: then its first call is waited for.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Optional

from concertina_agent.core import events as e
from concertina_protocol import MemberState
from concertina_protocol import worker_channel as w

ANSWER_SECONDS = 5.0
"""A worker that does not say how far it is (stopped, or its interpreter is busy) costs the others their agreement."""


class Stopping:
    """One round's, in one agent."""

    def __init__(self) -> None:
        self.attending: set[int] = set()
        """Ranks that have called should_checkpoint()."""
        self.next_call: Optional[int] = None
        """0: nobody attends here; else the earliest call at which all of this agent's workers can stop. None: not
        asked, or not all have answered."""
        self.call: Optional[int] = None
        """What the coordinator has decided."""
        self._asked_at: Optional[float] = None
        self._passed_unasked = -1
        """Calls that count as passed where no worker has asked yet."""
        self._waiting: set[int] = set()
        self._passed: dict[int, int] = {}

    @property
    def agreed(self) -> bool:
        """The workers stop by themselves, without a signal."""
        return bool(self.call)

    def ask(self, now: float, will_attend: bool = False) -> list[e.Effect]:
        """A drain has begun. `will_attend`: workers that do not ask yet will."""
        if self._asked_at is None:
            self._asked_at, self._waiting = now, set(self.attending)
            self._passed_unasked = 0 if will_attend else -1
            self._settle()
            return [e.SendToWorker(rank, w.QueryCalls()) for rank in sorted(self._waiting)]
        return []

    def attends(self, rank: int) -> list[e.Effect]:
        """Its first call, which waits for this answer."""
        self.attending.add(rank)
        if self.call:
            return [e.SendToWorker(rank, w.StopAtCall(self.call))]
        asked = self._asked_at is not None and self.call is None
        return [e.SendToWorker(rank, w.QueryCalls() if asked else w.Registered())]

    def passed(self, rank: int, calls: int) -> None:
        self._passed[rank] = calls
        self._waiting.discard(rank)
        self._settle()

    def ended(self, rank: int) -> None:
        """The worker is gone, nothing more will be heard of it."""
        self._waiting.discard(rank)
        self._settle()

    def stop_at(self, call: int) -> list[e.Effect]:
        """The coordinator's word."""
        if self.call is not None:
            return []
        self.call = call
        if not call:
            return [e.SignalWorkers(signal.SIGTERM)]
        return [e.SendToWorker(rank, w.StopAtCall(call)) for rank in sorted(self.attending)]

    def decide(self, members: Iterable[MemberState], now: float) -> Optional[int]:
        """On the coordinator: the call, once every member has answered or its time is up (then 0); None: not yet."""
        if self._asked_at is None or self.call is not None:
            return None
        answers = [member.next_call for member in members]
        if None not in answers:
            return max(answer for answer in answers if answer is not None)
        return 0 if now >= self._asked_at + ANSWER_SECONDS else None

    def _settle(self) -> None:
        if self._asked_at is not None and not self._waiting:
            self.next_call = 1 + max(self._passed.values(), default=self._passed_unasked)
