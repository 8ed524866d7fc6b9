"""The live view of the demo: what `concertina status -f` shows, over what has happened so far."""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.live import Live

from concertina.demo.history import History
from concertina.demo.stage import Stage
from concertina.terminal import show


class LiveView:
    """Shows the job until the block ends; a line every few seconds where the output is no terminal."""

    def __init__(self, stage: Stage, job: str, history: History, console: Console) -> None:
        self._stage, self._job, self._history, self._console = stage, job, history, console
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._terminal if console.is_terminal else self._lines, daemon=True)

    def __enter__(self) -> LiveView:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(timeout=5)

    def _terminal(self) -> None:
        with Live(console=self._console, refresh_per_second=4, transient=True) as live:
            while not self._closing.wait(0.25):
                live.update(show.detail(self._stage.job(self._job)))

    def _lines(self) -> None:
        while not self._closing.wait(3.0):
            status = show.status_of(self._stage.job(self._job))
            progress, checkpoint = status.progress, status.last_checkpoint
            parts = [f"{time.strftime('%H:%M:%S')}  {show.word(status)}", f"world {status.world.size or '-'}"]
            if progress and progress.percent is not None:
                parts.append(f"step {progress.step} ({progress.percent:.0f}%)")
                parts.append(f"ETA {show.duration(progress.eta_seconds)}" if progress.eta_seconds is not None else "")
                parts.append(f"loss {progress.loss:.3f}" if progress.loss else "")
                parts.append(f"{progress.tokens_per_second:,.0f} tokens/s" if progress.tokens_per_second else "")
            parts.append(f"checkpoint {checkpoint.step}" if checkpoint else "")
            self._console.print("  ".join(part for part in parts if part), highlight=False)
