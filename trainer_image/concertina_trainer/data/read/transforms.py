"""Processes that transform samples by the function that `trainer.data.transform` names.

If a thread of the worker called the function, its Python code would delay the thread that trains. The processes are
started as new programs, because a worker with threads or a GPU can't be forked. The processes stay for all rounds of
the worker (decision "Samples are transformed in processes of their own").

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from concertina_state.errors import InvalidInput
from concertina_trainer.data.sample import Sample

MOST_PROCESSES = 4
"""Maximum number of transform processes of one worker."""
_PROGRAM = "concertina_trainer.data.read.transform_process"


class TransformEnded(Exception):
    """Error that a process that transforms samples has ended. The next round starts a new process.

    A round is a period in which a fixed set of replicas trains.
    """


@functools.lru_cache(maxsize=1)
def transforms(entrypoint: str) -> Transforms:
    """Return this worker's processes that run the function `entrypoint`. They are started on first use."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Transforms(entrypoint, max(1, min(MOST_PROCESSES, cores)))


class Transforms:
    """Processes that run one transform."""

    def __init__(self, entrypoint: str, count: int) -> None:
        self._entrypoint, self._count = entrypoint, count
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    def apply(self, samples: Sequence[Sample], seed: int | None, vocab_size: int) -> list[Sample]:
        """Return the result of the transform for each sample. `seed` is None in an evaluation.

        Raises:
            InvalidInput: When the transform can't be imported, fails, or returns a value that is not a sample of the
                same shape.
            TransformEnded: When a process has ended.
        """
        with self._lock:
            try:
                return self._applied(samples, seed, vocab_size)
            except BaseException:  # answers that were not read would count as those of the next samples
                self.close()
                raise

    def close(self) -> None:
        """End the processes. If `apply` is called again, it starts new ones."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.kill()
            process.communicate()

    def _applied(self, samples: Sequence[Sample], seed: int | None, vocab_size: int) -> list[Sample]:
        self._start()
        edges = [len(samples) * i // self._count for i in range(self._count + 1)]
        parts = [
            (p, samples[edges[i] : edges[i + 1]]) for i, p in enumerate(self._processes) if edges[i] < edges[i + 1]
        ]
        for process, part in parts:
            self._send(process, (part, seed, vocab_size))
        results = [result for process, _ in parts for result in self._received(process)]
        for result in results:
            if isinstance(result, str):
                raise InvalidInput(f"trainer.data.transform {self._entrypoint} can't be used for {result}: correct it.")
        return results

    def _start(self) -> None:
        if self._processes:
            return
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", _PROGRAM, self._entrypoint]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            for _ in range(self._count)
        ]
        for process in self._processes:
            if problem := self._received(process):
                raise InvalidInput(
                    f"trainer.data.transform {self._entrypoint} can't be used, because {problem}: install its package "
                    "in the image of the container trainer, or add its folder to PYTHONPATH there."
                )

    def _send(self, process: subprocess.Popen[bytes], request: object) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_received` reports the end of the process
            pickle.dump(request, process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()

    def _received(self, process: subprocess.Popen[bytes]) -> Any:
        """Return the next answer of a process.

        Raises:
            TransformEnded: When the process has ended.

        Unpickling the answer is safe, because the process runs code of this package.
        """
        assert process.stdout is not None
        try:
            return pickle.load(process.stdout)
        except (EOFError, pickle.UnpicklingError) as error:
            raise TransformEnded(
                f"a process of trainer.data.transform {self._entrypoint} ended with exit status {process.wait()}"
            ) from error
