"""Live view of the demo: the same table as `concertina status -f`, below the messages that were printed before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rich.console import Console
from rich.live import Live

from concertina.durations import duration
from concertina.terminal import show
from concertina.terminal.watch import LOOK_EVERY, JobWatch


@asynccontextmanager
async def shown(watch: JobWatch, console: Console) -> AsyncIterator[None]:
    """Show the job's status in the terminal until the block ends.

    If the output is not a terminal, print a line every few seconds.
    """
    showing = asyncio.create_task((_terminal if console.is_terminal else _lines)(watch, console))
    try:
        yield
    finally:
        showing.cancel()
        with suppress(asyncio.CancelledError):
            await showing


async def _terminal(watch: JobWatch, console: Console) -> None:
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while True:
            live.update(show.detail(watch.job))
            await asyncio.sleep(LOOK_EVERY)


async def _lines(watch: JobWatch, console: Console) -> None:
    while True:
        await asyncio.sleep(3.0)
        status = watch.status
        progress, checkpoint = status.progress, status.last_checkpoint
        parts = [f"{time.strftime('%H:%M:%S')}  {show.word(status)}", f"world {status.world.size or '-'}"]
        if progress and progress.percent is not None:
            parts.append(f"step {progress.step} ({progress.percent:.0f}%)")
            parts.append(f"ETA {duration(progress.eta_seconds)}" if progress.eta_seconds is not None else "")
            parts.append(f"loss {progress.loss:.3f}" if progress.loss else "")
            parts.append(f"{progress.tokens_per_second:,.0f} tokens/s" if progress.tokens_per_second else "")
        parts.append(f"checkpoint {checkpoint.step}" if checkpoint else "")
        console.print("  ".join(part for part in parts if part), highlight=False)
