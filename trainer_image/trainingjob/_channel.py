"""The script's side of the conversation that `concertina_protocol.worker_channel.worker` tells."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Optional, Tuple

from concertina_protocol import Progress, ProtocolError
from concertina_protocol import worker_channel as w


class Channel:
    def __init__(self, path: str, rank: int) -> None:
        """Raises OSError where no agent listens."""
        self._rank, self._pid = rank, os.getpid()
        self._end = w.WorkerEnd(path)
        self._changed = threading.Condition()
        self._open, self._asked, self._attends = True, False, False
        self._passed = 0
        """Calls of should_checkpoint() that have returned False, or are about to."""
        self._stop_at = 0
        self._last: Optional[Tuple[int, float]] = None
        self._step_seconds = 0.0
        self._first_step_at: Optional[float] = None
        self._restored_step: Optional[int] = None
        self._send(w.Hello(rank, self._pid))
        threading.Thread(target=self._listen, name="trainingjob", daemon=True).start()

    @property
    def ours(self) -> bool:
        """False in a process that was forked from the worker, such as a data loader's."""
        return os.getpid() == self._pid

    # --- what the script calls --------------------------------------------------------------------------------------

    def should_checkpoint(self) -> bool:
        with self._changed:
            if self._stop_at and self._passed >= self._stop_at:
                raise SystemExit(0)
            if not self._attends:
                self._attends = self._asked = True
                self._send(w.Register(self._rank))
            self._changed.wait_for(lambda: not self._open or not self._asked)
            self._passed += 1
            return self._open and self._passed == self._stop_at

    def report(
        self, step: int, steps: int, loss: Optional[float], tokens_per_second: float, samples: int, phase: str
    ) -> None:
        if self._stop_at and self._passed >= self._stop_at:
            return None  # a step beyond the checkpoint will be trained again
        now, step = time.time(), int(step)  # numbers may be numpy's or torch's, which JSON does not know
        if self._last is None:
            self._first_step_at, self._restored_step = now, max(0, step - 1)
        elif step > self._last[0]:
            self._step_seconds = (time.monotonic() - self._last[1]) / (step - self._last[0])
        self._last = step, time.monotonic()
        if self._rank != 0:
            return self._send(w.Beat(self._rank, step, phase))
        return self._send(
            Progress(
                step=step,
                steps=int(steps) or None,
                loss=float("nan") if loss is None else float(loss),
                tokens_per_second=float(tokens_per_second),
                step_seconds=self._step_seconds,
                position=int(samples),
                phase=phase,
                at=now,
                first_step_at=self._first_step_at,
                restored_step=self._restored_step,
            )
        )

    # --- the wire ---------------------------------------------------------------------------------------------------

    def _send(self, message: w.Message) -> None:
        with contextlib.suppress(w.ChannelClosed):
            self._end.send(message)

    def _listen(self) -> None:
        try:
            while True:
                self._on_message(self._end.receive(object))
        except (w.ChannelClosed, ProtocolError):
            with self._changed:
                self._open = False
                self._changed.notify_all()

    def _on_message(self, message: object) -> None:
        with self._changed:
            if isinstance(message, w.QueryCalls):
                self._asked = True
                self._send(w.CallCount(self._rank, self._passed))
            elif isinstance(message, w.Registered):
                self._asked = False
            elif isinstance(message, w.StopAtCall):
                self._asked, self._stop_at = False, message.call
            self._changed.notify_all()


_channel: Optional[Channel] = None
_tried = False


def connected(path: str, rank: int) -> Optional[Channel]:
    """The connection of this process, opened at the first call; None where no agent listens."""
    global _channel, _tried
    if not _tried:
        _tried = True
        try:
            _channel = Channel(path, rank)
        except OSError as error:
            print(f"trainingjob: the agent can't be reached ({error}); nothing is reported", file=sys.stderr)
    return _channel if _channel is not None and _channel.ours else None
