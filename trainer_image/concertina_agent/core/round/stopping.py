"""Call at which the workers of a user's own command stop, if its script calls `trainingjob.should_checkpoint()`.

Every rank calls the function once a step, so the number of its calls is a clock that all ranks share. When a drain
begins, each agent asks its workers how many calls they have finished. After its answer, a worker waits at its next
call. The coordinator names the highest number plus one: no worker has passed that call, every worker reaches it, and
the call returns true. No collective is needed, so no collective can hang (decision "A script's ranks agree by counting
calls").

If no worker calls the function at all (call 0), the command gets SIGTERM and its grace period. The exception is a drain
whose state must be saved and is only in node memory: then the agent waits for the first call. The module has no side
effects.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Optional

from concertina_agent.core import events as e
from concertina_protocol import MemberState
from concertina_protocol import worker_channel as w

ANSWER_SECONDS = 5.0
"""Seconds that workers have to answer. If one does not (it is stopped or busy), there is no agreement on a call."""


class Stopping:
    """State of the agreement in one agent for one round."""

    def __init__(self) -> None:
        self.attending: set[int] = set()
        """Ranks that have called should_checkpoint()."""
        self.next_call: Optional[int] = None
        """Earliest call at which all of this agent's workers can stop, or 0 if none calls should_checkpoint().

        The call is None if the workers were not asked, or not all have answered.
        """
        self.call: Optional[int] = None
        """Call that the coordinator has decided on."""
        self._asked_at: Optional[float] = None
        self._passed_unasked = -1
        """Number of calls that counts as finished if no worker has called the function yet."""
        self._waiting: set[int] = set()
        self._passed: dict[int, int] = {}

    @property
    def agreed(self) -> bool:
        """Whether the workers stop by themselves, without a signal."""
        return bool(self.call)

    def ask(self, now: float, will_attend: bool = False) -> list[e.Effect]:
        """Ask the workers for their number of calls, because a drain has begun.

        `will_attend` is set if workers that have not called the function yet will call it.
        """
        if self._asked_at is None:
            self._asked_at, self._waiting = now, set(self.attending)
            self._passed_unasked = 0 if will_attend else -1
            self._settle()
            return [e.SendToWorker(rank, w.QueryCalls()) for rank in sorted(self._waiting)]
        return []

    def attends(self, rank: int) -> list[e.Effect]:
        """Handle the first call of a worker, which waits for the answer."""
        self.attending.add(rank)
        if self.call:
            return [e.SendToWorker(rank, w.StopAtCall(self.call))]
        is_draining = self._asked_at is not None and self.call is None
        return [e.SendToWorker(rank, w.QueryCalls() if is_draining else w.Registered())]

    def passed(self, rank: int, calls: int) -> None:
        self._passed[rank] = calls
        self._waiting.discard(rank)
        self._settle()

    def ended(self, rank: int) -> None:
        """Stop waiting for a worker that has ended."""
        self._waiting.discard(rank)
        self._settle()

    def stop_at(self, call: int) -> list[e.Effect]:
        """Handle the coordinator's decision."""
        if self.call is not None:
            return []
        self.call = call
        if not call:
            return [e.SignalWorkers(signal.SIGTERM)]
        return [e.SendToWorker(rank, w.StopAtCall(call)) for rank in sorted(self.attending)]

    def decide(self, members: Iterable[MemberState], now: float) -> Optional[int]:
        """Return the call on the coordinator, or None if it is not decided yet.

        The call is decided once every member has answered, or their time is up; it is 0 then.
        """
        if self._asked_at is None or self.call is not None:
            return None
        answers = [member.next_call for member in members]
        if None not in answers:
            return max(answer for answer in answers if answer is not None)
        return 0 if now >= self._asked_at + ANSWER_SECONDS else None

    def _settle(self) -> None:
        if self._asked_at is not None and not self._waiting:
            self.next_call = 1 + max(self._passed.values(), default=self._passed_unasked)
