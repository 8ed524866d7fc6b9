"""Trace of some steps of one rank by torch.profiler, which a user requests by `concertina trace`."""

from __future__ import annotations

import gzip
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from concertina_protocol import step_traces
from concertina_protocol.stderr import write_line
from concertina_protocol.worker_channel import Message, TraceSteps
from concertina_state import collective_calls


class Traces:
    """Traces of one worker, one at a time. A step without a requested trace costs only one comparison."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._request: TraceSteps | None = None
        self._trace: StepTrace | None = None

    def ask(self, request: TraceSteps) -> None:
        """Request a trace. Any thread may call this method. While a trace is in progress, the request waits."""
        self._request = request

    def list_calls(self, send: Callable[[Message], None]) -> None:
        """Call `send` with a message that lists the collectives of this process. Any thread may call this method."""
        collective_calls.answer(send)

    def after(self, step: int) -> None:
        """Record that a step has ended. The training thread calls this after each step."""
        if self._trace is None and self._request is not None:
            self._trace, self._request = StepTrace(self._request, self._rank), None
        if self._trace is not None and not self._trace.after(step):
            self._trace = None


class StepTrace:
    """Trace that is in progress.

    The training thread calls `after` after each step. `after` never raises an error: the error is written into a file
    beside the trace.
    """

    def __init__(self, request: TraceSteps, rank: int) -> None:
        self._request, self._rank = request, rank
        self._path = step_traces.trace_file(step_traces.folder_of_worker(), request.name, rank)
        self._profiler: Any = None
        self._step: Any = None
        """Mark of the step in progress, which is an open `record_function` of the profiler."""
        self._current = self._last = 0

    def after(self, step: int) -> bool:
        """Record that a step has ended, and return whether the trace continues."""
        if step == self._current:
            return True  # the script has reported the same step twice
        self._current = step
        try:
            if self._profiler is None:
                if not step_traces.wanted_file(self._path).exists():
                    return False
                if step + 1 >= self._request.first_step:
                    self._begin(step)
                return True
            self._step.__exit__(None, None, None)
            if step < self._last:
                self._mark(step)
                return True
            self._profiler.stop()
            threading.Thread(target=self._write, name="trace", daemon=True).start()
        except Exception as error:
            self._fail(error)
        return False

    def _begin(self, step: int) -> None:
        if "torch" not in sys.modules:
            raise RuntimeError("the script does not use torch, which records the trace")
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profiler = profile(activities=activities)
        self._profiler.start()
        self._last = step + self._request.steps
        self._mark(step)

    def _mark(self, step: int) -> None:
        from torch.profiler import record_function

        self._step = record_function(f"step {step + 1}")
        self._step.__enter__()

    def _write(self) -> None:
        """Write the trace in a thread, while training continues."""
        raw = self._path.with_suffix(".raw")
        try:
            self._profiler.export_chrome_trace(str(raw))
            trace = json.loads(raw.read_bytes())
            raw.unlink()
            content = {"rank": self._rank, "trace": trace, "flightRecorder": collective_calls.flight_record()}
            packed = gzip.compress(json.dumps(content).encode(), 6)
            if len(packed) <= step_traces.MOST_BYTES:
                self._put(self._path, packed)
                return
            problem = f"the trace has {len(packed)} bytes, more than {step_traces.MOST_BYTES}: ask for fewer steps"
            self._fail(ValueError(problem))
        except Exception as error:
            self._fail(error)
        finally:
            raw.unlink(missing_ok=True)

    def _fail(self, error: Exception) -> None:
        sentence = f"no trace of rank {self._rank}: {type(error).__name__}: {error}"
        write_line(sentence)
        self._put(step_traces.error_file(self._path), sentence.encode())

    def _put(self, path: Path, content: bytes) -> None:
        """Write a file of the trace completely or not at all, and only if a client still waits for the trace."""
        part = path.with_name(f"{path.name}.part")
        try:
            if step_traces.wanted_file(self._path).exists():
                part.write_bytes(content)
                os.replace(part, path)
        except OSError as error:
            write_line(f"the trace can't be written: {error}")
