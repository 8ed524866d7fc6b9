"""A stream that says what an agent is now: only the latest counts, and mere numbers can wait."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Generic, TypeVar

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
        after, step=before.step, pulses=before.pulses, snapshot_step=before.snapshot_step
    )


MEMBER: Lines[p.MemberState] = Lines(_same_but_numbers, lambda before, after: after)
WHOLE: Lines[p.Report] = Lines(p.only_numbers, lambda before, after: after)
CHANGES: Lines[p.Report] = Lines(p.only_numbers, p.change)


async def stream(
    wire: Connection,
    state: Callable[[], S],
    changes: Notifier,
    lines: Lines[S],
    pace: float,
    beat: float = p.BEAT_SECONDS,
) -> None:
    """Send what `state` returns now, whenever it changes (numbers alone: `pace` seconds after the line before), and at
    least every `beat` seconds."""
    loop, count = asyncio.get_running_loop(), changes.count
    with contextlib.suppress(OSError):
        said = state()
        await wire.send(said)
        while True:
            at = loop.time()
            await asyncio.sleep(MIN_GAP_SECONDS)
            while True:
                now = state()
                wait = beat if now == said else pace if lines.only_numbers(said, now) else 0.0
                if (left := at + wait - loop.time()) <= 0:
                    break
                count = await changes.wait(count, left)
            await wire.send(lines.line(said, now))
            said = now
