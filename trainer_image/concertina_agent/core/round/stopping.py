"""Agreement of all ranks on the number of the `trainingjob.should_checkpoint()` call at which a user's command stops.

Every rank calls the function once per step, so the number of calls is a clock that all ranks share. When a drain
begins, each agent asks its workers how many calls they have finished. A worker that has answered waits when it calls
the function the next time. The coordinator then chooses a call: the highest answer plus one. No worker has made a later
call, and every worker reaches this call. At this call, the function returns True on all ranks. The agreement needs no
collective, which could hang (decision "A script's ranks agree by counting calls").

If no worker has called the function (call 0), the workers receive SIGTERM, and must exit within their grace period.
There is one exception: if the drain must save a state that is only in node memory, the agent waits for the first call.

The module has no side effects.

The coordinator is the agent of rank 0.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Optional

from concertina_agent.core import events as e
from concertina_protocol import MemberState
from concertina_protocol import worker_channel as w

ANSWER_SECONDS = 5.0
"""Seconds within which workers must answer. If a worker is stopped or busy, the ranks agree on no call."""


class Stopping:
    """Agreement on the call of should_checkpoint() at which all ranks stop, for one agent in one round.

    A round is a period in which a fixed set of replicas trains.
    """

    def __init__(self) -> None:
        self.attending: set[int] = set()
        """Ranks that have called should_checkpoint()."""
        self.next_call: Optional[int] = None
        """Number of the first call at which all workers of this agent can stop, or 0 if no worker makes such calls.

        The value is None until the workers have been asked and all have answered.
        """
        self.call: Optional[int] = None
        """Number of the should_checkpoint() call that the coordinator has chosen, or None."""
        self._asked_at: Optional[float] = None
        self._passed_unasked = -1
        """Number of finished calls to assume for the workers of this agent if none of them has called the function yet.

        The number is 0 if the workers are expected to call the function later, otherwise -1.
        """
        self._waiting: set[int] = set()
        self._passed: dict[int, int] = {}

    @property
    def agreed(self) -> bool:
        """True if the workers stop by themselves at an agreed call of should_checkpoint(), without a signal."""
        return bool(self.call)

    def ask(self, now: float, will_attend: bool = False) -> list[e.Effect]:
        """Request from the workers their numbers of finished should_checkpoint() calls, to stop all at the same call.

        This method is called in a drain. Only workers that have called the function get the request. If no worker has
        called it yet and `will_attend` is true, wait for a first call.

        In a drain, all ranks stop after the same step.
        """
        if self._asked_at is None:
            self._asked_at, self._waiting = now, set(self.attending)
            self._passed_unasked = 0 if will_attend else -1
            self._settle()
            return [e.SendToWorker(rank, w.QueryCalls()) for rank in sorted(self._waiting)]
        return []

    def attends(self, rank: int) -> list[e.Effect]:
        """Record a worker's first call of should_checkpoint(), and answer it.

        The worker waits for the answer.
        """
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
        """Record that a worker has ended, so that no answer of this worker is expected."""
        self._waiting.discard(rank)
        self._settle()

    def stop_at(self, call: int) -> list[e.Effect]:
        """Make this agent's workers stop at the call of should_checkpoint() that the coordinator has chosen.

        `call` is the number of that call. If it is 0, the workers receive SIGTERM instead.

        The coordinator is the agent of rank 0.
        """
        if self.call is not None:
            return []
        self.call = call
        if not call:
            return [e.SignalWorkers(signal.SIGTERM)]
        return [e.SendToWorker(rank, w.StopAtCall(call)) for rank in sorted(self.attending)]

    def decide(self, members: Iterable[MemberState], now: float) -> Optional[int]:
        """Return the number of the should_checkpoint() call at which all workers stop, or None if it is undecided.

        Only the coordinator (the agent of rank 0) decides this, when every member has answered. If a member has not
        answered in time, the result is 0, and the workers receive SIGTERM.
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
