"""Stream by which an agent sends its state to another process, on each change and regularly as a heartbeat.

Only the newest state is sent. A change that affects only numbers, such as the step, may be sent later.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Generic, Optional, TypeVar

import concertina_protocol as p
from concertina_agent.runtime.notifier import Notifier
from concertina_protocol.connection import Connection

MIN_GAP_SECONDS = 0.004
"""Minimum seconds between two lines of a stream, however often the state changes.

A failure often changes the state several times within milliseconds, and only the last of these changes names the cause.
"""
GAP_RATIO = 10
"""Minimum ratio of the time between two lines to the processor time that a line takes.

A line about a thousand members takes milliseconds of processor time.
"""
MAX_GAP_SECONDS = 0.05
"""Maximum seconds between two lines that GAP_RATIO causes, however long a line took on a busy processor."""
S = TypeVar("S", p.MemberState, p.Report)


@dataclasses.dataclass(frozen=True)
class Lines(Generic[S]):
    """Functions that make the message for a change of a state, and decide whether the message can wait."""

    only_numbers: Callable[[S, S], bool]
    """Function that returns whether two states differ only in numbers.

    A change of numbers only may be sent `pace` seconds later.
    """
    line: Callable[[S, S], p.Message]
    """Function that returns the message for a change. It receives the state before and after the change."""


def _same_but_numbers(before: p.MemberState, after: p.MemberState) -> bool:
    return before == dataclasses.replace(
        after, step=before.step, heartbeats=before.heartbeats, snapshot_step=before.snapshot_step
    )


MEMBER: Lines[p.MemberState] = Lines(_same_but_numbers, lambda before, after: after)
WHOLE: Lines[p.Report] = Lines(p.only_numbers, lambda before, after: after)
CHANGES: Lines[p.Report] = Lines(p.only_numbers, p.change)


def often(state: S) -> float:
    """Return the seconds between heartbeats, the same for every state.

    Use this function for a receiver that must notice a failure quickly, such as the coordinator.
    """
    return p.BEAT_SECONDS


async def stream(
    wire: Connection,
    state: Callable[[], S],
    changes: Notifier,
    lines: Lines[S],
    pace: float,
    beat: Callable[[S], float],
) -> None:
    """Send the present `state` when it changes, and regularly as a heartbeat.

    A change that affects only numbers is delayed until `pace` seconds have passed since the line with the previous
    change. Without any change, a line is sent `beat(state)` seconds after the previous line. Repeated lines have the
    same bytes, so the receiver can skip decoding them.
    """
    loop, count, spent_seconds = asyncio.get_running_loop(), changes.count, 0.0
    unchanged_line: Optional[bytes] = None
    with contextlib.suppress(OSError):
        sent = state()
        await wire.send(sent)
        news_at = sent_at = loop.time()
        while True:
            await asyncio.sleep(max(MIN_GAP_SECONDS, min(MAX_GAP_SECONDS, GAP_RATIO * spent_seconds)))
            while True:
                begun = time.thread_time()
                now = state()
                wait = math.inf if now == sent else pace if lines.only_numbers(sent, now) else 0.0
                if (remaining_seconds := min(news_at + wait, sent_at + beat(sent)) - loop.time()) <= 0:
                    break
                count = await changes.wait(count, remaining_seconds)
            sent_at = loop.time()
            if sent_at >= news_at + wait:
                line = p.encode(lines.line(sent, now))
                sent, news_at, unchanged_line = now, sent_at, None
            else:
                line = unchanged_line = unchanged_line or p.encode(lines.line(sent, sent))
            spent_seconds = time.thread_time() - begun
            await wire.send_line(line)
