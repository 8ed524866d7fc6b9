"""Resources of real processes as the kernel reports them: their own time and memory, and that of their children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from builders.until import until
from concertina_agent.metrics import worker_processes
from concertina_agent.metrics.worker_processes import WorkerProcess, WorkerProcesses

BURN = "while True: sum(range(10000))"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"
CHILD = "import time\nwhile time.process_time() < 0.4: pass"
ENDED = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}]); print('over', flush=True); input()"
HOLDS = "x = b'x' * (64 << 20); print('held', flush=True); input()"


@contextlib.contextmanager
def process(code: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", code]
    started = subprocess.Popen(command, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.communicate()


def test_what_a_worker_starts_counts_as_its_own() -> None:
    with process(PARENT) as worker:
        looked = WorkerProcesses()

        def use() -> worker_processes.ProcessUsage:
            return looked.look([WorkerProcess(0, 4, (worker.pid,))])[0]

        found = until(lambda: found if (found := use()).cpu_seconds > 0.5 else None, "time of the child")
        assert (found.rank, found.running, found.threads >= 2) == (4, True, True)


def test_so_does_what_has_ended() -> None:
    with process(ENDED) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        assert WorkerProcesses().look([WorkerProcess(0, 0, (worker.pid,))])[0].cpu_seconds > 0.3


def test_memory_and_its_peak() -> None:
    with process(HOLDS) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        use = WorkerProcesses().look([WorkerProcess(0, 0, (worker.pid,))])[0]
        assert 64 << 20 < use.resident_bytes <= use.peak_bytes < 256 << 20


def test_the_next_worker_in_a_place_adds_to_what_was_counted() -> None:
    looked = WorkerProcesses()
    with process(BURN) as first:
        before = until(
            lambda: seen if (seen := looked.look([WorkerProcess(0, 0, (first.pid,))])[0].cpu_seconds) > 0.3 else None,
            "its time",
        )
    gone = looked.look([])[0]
    assert (gone.running, gone.resident_bytes, gone.cpu_seconds) == (False, 0, before)
    with process(BURN) as second:
        place = [WorkerProcess(0, 1, (second.pid,))]
        own = until(lambda: seen if (seen := WorkerProcesses().look(place)[0].cpu_seconds) > 0.1 else None, "its time")
        assert looked.look(place)[0].cpu_seconds >= before + own


def test_who_is_gone_by_now_is_not_running() -> None:
    with process("pass") as worker:
        worker.wait()
        assert not any(use.running for use in WorkerProcesses().look([WorkerProcess(0, 0, (worker.pid,))]).values())


def test_this_process_and_its_network() -> None:
    cpu, resident = worker_processes.own()
    assert cpu > 0
    assert resident > 1 << 20
    assert worker_processes.network() is not None
    assert worker_processes.network("/nowhere") is None
