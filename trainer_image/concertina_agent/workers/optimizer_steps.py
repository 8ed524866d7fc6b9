"""Counter of a script's optimizer steps: a global hook of torch that runs in the script's process.

The hook rewrites a few bytes in a file, and the agent reads them (decision "Counting steps of scripts without
trainingjob"). The hook does not change the script and does not import torch. An error of the hook ends the count, but
never the script. `hook.sitecustomize` calls `install` before the script begins, so this module imports little. It
supports Python 3.9 and later.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes milliseconds, in each Python that a script starts
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, Optional

VARIABLE = "CONCERTINA_STEP_FILE"
"""Environment variable with the path of the file for the count. If it is not set, nothing is counted."""
LAYOUT = struct.Struct("<qddd32s")
"""Layout of the file: number of steps, time of the first one (Unix seconds), CLOCK_MONOTONIC of the last call of an
optimizer, seconds of the last step, and the class of the optimizer that began it."""
MODULE = "torch.optim.optimizer"
NAME_BYTES = 32


class StepCounter:
    """Hook that counts the steps of a process.

    A step is a sequence of optimizer calls in which no optimizer is called twice. For example, if the two optimizers of
    a GAN take turns, one call of each of the two makes one step. If a model has one optimizer for each parameter, one
    call of each optimizer makes one step. If a script calls one optimizer five times for each call of another one, the
    more frequent calls are counted.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: Optional[int] = None
        self._handle: Any = None
        self._stops_in_forks = False
        self._in_step: set[int] = set()
        """Optimizers that have been called in the current step."""
        self._steps = 0
        self._first_at = self._begun_at = self._seconds = 0.0
        self._name = b""

    def register(self, module: ModuleType) -> None:
        """Register the hook with torch's module of optimizers. torch before 2.0 has no global hook."""

        def after_step(optimizer: object, args: object, kwargs: object) -> None:
            try:
                self._count(optimizer)
            except Exception:  # the script continues without a count
                self.stop()

        self._handle = module.register_optimizer_step_post_hook(after_step)

    def stop(self) -> None:
        """Stop counting.

        For example, a process that a worker has forked stops counting, because its steps are not the worker's.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _count(self, optimizer: object) -> None:
        now = time.monotonic()
        # A process that stays (`trainingjob.run`) gets another path in each round.
        path = os.environ.get(VARIABLE, self._path)
        if self._file is None or path != self._path:
            self._begin_round(path)
        key = id(optimizer)
        if not self._in_step or key in self._in_step:
            self._in_step.clear()
            self._begin_step(type(optimizer).__name__, now)
        self._in_step.add(key)
        assert self._file is not None
        values = (self._steps, self._first_at, now, self._seconds, self._name)
        os.pwrite(self._file, LAYOUT.pack(*values), 0)

    def _begin_round(self, path: str) -> None:
        """Begin to count the steps of a new round, in the file `path`.

        Raises:
            OSError: See `_claimed`.
        """
        if self._file is not None:
            os.close(self._file)
        self._path, self._file, self._steps, self._seconds = path, None, 0, 0.0
        self._in_step.clear()
        self._file = self._claimed()

    def _begin_step(self, name: str, now: float) -> None:
        if self._steps == 0:
            self._first_at = time.time()
        else:
            self._seconds = now - self._begun_at
        self._steps += 1
        self._begun_at = now
        self._name = name.encode(errors="replace")[:NAME_BYTES]

    def _claimed(self) -> int:
        """Open and lock the file for this process until it ends, and return the file descriptor.

        Raises:
            OSError: If another process of this worker, such as its parent, counts its steps already.
        """
        import fcntl

        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise
        if not self._stops_in_forks:
            os.register_at_fork(after_in_child=self.stop)
            self._stops_in_forks = True
        return file


class TorchFinder:
    """Import finder that only waits until torch's optimizers have been imported, and then registers the counter."""

    def __init__(self, counter: StepCounter) -> None:
        self._counter = counter

    def find_spec(
        self, name: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if name != MODULE or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        for finder in list(sys.meta_path):
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                with contextlib.suppress(Exception):  # a loader of another kind: nothing is counted
                    _run_after_import(spec, self._counter.register)
                return spec
        return None


def install(path: str) -> None:
    """Count the steps of this process into a file, from the import of torch on.

    Args:
        path: Path of the file.
    """
    counter = StepCounter(path)
    module = sys.modules.get(MODULE)
    if module is not None:  # a worker that starts warm has imported it already
        counter.register(module)
    else:
        sys.meta_path.insert(0, TorchFinder(counter))


def _run_after_import(spec: ModuleSpec, register: Any) -> None:
    """Arrange that `register(module)` is called as soon as the module of `spec` has been imported."""
    loader: Any = spec.loader
    execute = loader.exec_module

    def execute_and_register(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        with contextlib.suppress(Exception):  # an older torch, or one that has changed: nothing is counted
            register(module)

    loader.exec_module = execute_and_register
