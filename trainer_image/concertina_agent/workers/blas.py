"""Number of threads of the OpenBLAS library in a forked worker.

OpenBLAS starts its threads when it is loaded. A process that forks workers must have only one thread, so it loads
OpenBLAS with one thread. After the fork, the worker sets the number of threads that OpenBLAS would have chosen.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping

SETTERS = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "", "_64_")
)
"""Names under which different wheels export OpenBLAS's function."""


def set_threads(environment: Mapping[str, str]) -> None:
    """Set the number of threads of each OpenBLAS library that is loaded in this process."""
    for path in _libraries():
        library = ctypes.CDLL(path)
        setter = next((getattr(library, name) for name in SETTERS if hasattr(library, name)), None)
        if setter is not None:
            setter(ctypes.c_int(_threads(environment)))


def _threads(environment: Mapping[str, str]) -> int:
    """Return the number of threads that OpenBLAS would choose: at most the number of available processors."""
    processors = len(os.sched_getaffinity(0))
    for name in ("OPENBLAS_NUM_THREADS", "OPENBLAS_DEFAULT_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"):
        with contextlib.suppress(ValueError):
            number = int(environment.get(name, "").partition(",")[0])
            if number > 0:
                return min(number, processors)
    return processors


def _libraries() -> set[str]:
    """Return the paths of the OpenBLAS libraries that this process has loaded."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as lines:
        paths = (line.rstrip("\n").split(maxsplit=5)[5:] for line in lines)
        return {path[0] for path in paths if path and "openblas" in os.path.basename(path[0])}
    return set()
