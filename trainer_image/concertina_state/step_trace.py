"""A trace of some steps of one rank, by torch.profiler, where a person has asked for one (`concertina trace`)."""

from __future__ import annotations

import gzip
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from concertina_protocol import step_traces
from concertina_protocol.stderr import write_line
from concertina_protocol.worker_channel import TraceSteps


class Traces:
    """Of one worker: one at a time. Without a wish a step costs a comparison."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._wish: TraceSteps | None = None
        self._trace: StepTrace | None = None

    def ask(self, wish: TraceSteps) -> None:
        """From any thread. One that comes while another is made takes its turn after it."""
        self._wish = wish

    def after(self, step: int) -> None:
        """From the thread that trains."""
        if self._trace is None and self._wish is not None:
            self._trace, self._wish = StepTrace(self._wish, self._rank), None
        if self._trace is not None and not self._trace.after(step):
            self._trace = None


class StepTrace:
    """`after` is called after each step, from the thread that trains. It never raises: what goes wrong is written where
    the trace should be."""

    def __init__(self, asked: TraceSteps, rank: int) -> None:
        self._asked, self._rank = asked, rank
        self._path = step_traces.trace_file(step_traces.folder_of_worker(), asked.name, rank)
        self._profiler: Any = None
        self._step: Any = None
        """The mark of the one under way."""
        self._seen = self._last = 0

    def after(self, step: int) -> bool:
        """False when it is over."""
        if step == self._seen:
            return True  # a script may tell of one twice
        self._seen = step
        try:
            if self._profiler is None:
                if not step_traces.wanted_file(self._path).exists():
                    return False
                if step + 1 >= self._asked.first_step:
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
            raise RuntimeError("the script does not use torch, whose profiler makes traces")
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profiler = profile(activities=activities)
        self._profiler.start()
        self._last = step + self._asked.steps
        self._mark(step)

    def _mark(self, step: int) -> None:
        from torch.profiler import record_function

        self._step = record_function(f"step {step + 1}")
        self._step.__enter__()

    def _write(self) -> None:
        """Beside the steps that follow."""
        raw = self._path.with_suffix(".raw")
        try:
            self._profiler.export_chrome_trace(str(raw))
            trace = json.loads(raw.read_bytes())
            raw.unlink()
            found = {"rank": self._rank, "trace": trace, "flightRecorder": flight_record()}
            packed = gzip.compress(json.dumps(found).encode(), 6)
            if len(packed) > step_traces.MOST_BYTES:
                raise ValueError(f"it has {len(packed)} bytes, more than {step_traces.MOST_BYTES}: ask for fewer steps")
            self._put(self._path, packed)
        except Exception as error:
            self._fail(error)
        finally:
            raw.unlink(missing_ok=True)

    def _fail(self, error: Exception) -> None:
        sentence = f"no trace of rank {self._rank}: {type(error).__name__}: {error}"
        write_line(sentence)
        self._put(step_traces.error_file(self._path), sentence.encode())

    def _put(self, path: Path, content: bytes) -> None:
        """Whole, or not there; and not where nobody waits for it any more."""
        part = path.with_name(f"{path.name}.part")
        try:
            if step_traces.wanted_file(self._path).exists():
                part.write_bytes(content)
                os.replace(part, path)
        except OSError as error:
            write_line(f"the trace can't be written: {error}")


def flight_record() -> dict[str, Any]:
    """What torch's flight recorder holds of collectives; empty where it is off (TORCH_FR_BUFFER_SIZE)."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return {}
    from torch._C import _distributed_c10d as c10d

    backend = "nccl" if "nccl" in dist.get_backend() else "gloo"
    dump = getattr(c10d, "_dump_nccl_trace_json" if backend == "nccl" else "_dump_fr_trace_json", None)
    found = json.loads(dump()) if dump else {}
    return found if isinstance(found, dict) else {}
