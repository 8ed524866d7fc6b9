"""A stream that says what an agent is now: only the latest counts, and mere numbers can wait."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Generic, Optional, TypeVar

import concertina_protocol as p
from concertina_agent.runtime.notifier import Notifier
from concertina_protocol.connection import Connection

MIN_GAP_SECONDS = 0.02
"""Between two lines."""
S = TypeVar("S", p.MemberState, p.Report)


@dataclasses.dataclass(frozen=True)
class Lines(Generic[S]):
    """What a stream of states says."""

    only_numbers: Callable[[S, S], bool]
    """Whether news is such that it can wait for `pace`."""
    line: Callable[[S, S], p.Message]
    """That tells the second to who knows the first."""


def _same_but_numbers(before: p.MemberState, after: p.MemberState) -> bool:
    return before == dataclasses.replace(
        after, step=before.step, heartbeats=before.heartbeats, snapshot_step=before.snapshot_step
    )


MEMBER: Lines[p.MemberState] = Lines(_same_but_numbers, lambda before, after: after)
WHOLE: Lines[p.Report] = Lines(p.only_numbers, lambda before, after: after)
CHANGES: Lines[p.Report] = Lines(p.only_numbers, p.change)


def often(state: S) -> float:
    """The beat of whoever is to notice at once that nobody speaks any more."""
    return p.BEAT_SECONDS


async def stream(
    wire: Connection,
    state: Callable[[], S],
    changes: Notifier,
    lines: Lines[S],
    pace: float,
    beat: Callable[[S], float],
) -> None:
    """Send what `state` returns now, whenever it changes (numbers alone: `pace` seconds after the news before), and
    every `beat(state)` seconds after a line that nothing is new: the very same bytes each time, which cost who hears
    them little."""
    loop, count = asyncio.get_running_loop(), changes.count
    nothing_new: Optional[bytes] = None
    with contextlib.suppress(OSError):
        said = state()
        await wire.send(said)
        news_at = at = loop.time()
        while True:
            await asyncio.sleep(MIN_GAP_SECONDS)
            while True:
                now = state()
                wait = math.inf if now == said else pace if lines.only_numbers(said, now) else 0.0
                if (left := min(news_at + wait, at + beat(said)) - loop.time()) <= 0:
                    break
                count = await changes.wait(count, left)
            at = loop.time()
            if at >= news_at + wait:
                await wire.send(lines.line(said, now))
                said, news_at, nothing_new = now, at, None
            else:
                nothing_new = nothing_new or p.encode(lines.line(said, said))
                await wire.send_line(nothing_new)
