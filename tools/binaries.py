"""Find or build the programs that setup provides. With program names as arguments, print their paths.

Setup does not include all programs. `prometheus` and `promtool` test dashboards and alerts. `vale` and `actionlint`
check prose and workflows. `kind` and `kueue` are used by long tests, and `jobset` by benchmarks/queues.py. The argument
`next-kubernetes` builds the programs of the next Kubernetes version, which have the same names as the pinned ones.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from concertina.local.binaries import programs
from concertina.local.errors import LocalClusterError

SET_UP = (programs.CONTROL_PLANE, programs.HELM)
OTHERS = (programs.PROMETHEUS, programs.VALE, programs.ACTIONLINT, programs.KIND, programs.KUEUE, programs.JOBSET)
NEXT = "next-kubernetes"
QUIET_SECONDS = 15.0
"""Seconds between two progress lines of one build if the output is not a terminal."""


@contextmanager
def telling(console: Console) -> Iterator[Callable[[str], None]]:
    """Show the current build and its duration.

    A terminal shows one line that is updated, other outputs get new lines.
    """
    begun = time.monotonic()
    if console.is_terminal:
        with console.status("") as status:
            yield lambda text: status.update(f"{text[:100]} [dim]{time.monotonic() - begun:.0f} s")
        return
    last = [-QUIET_SECONDS]

    def say(text: str) -> None:
        elapsed = time.monotonic() - begun
        if elapsed - last[0] >= QUIET_SECONDS:
            last[0] = elapsed
            console.print(f"{elapsed:4.0f} s  {text}", soft_wrap=True, markup=False)

    yield say


def main() -> int:
    console = Console(stderr=True, highlight=False)
    wanted = sys.argv[1:]
    if wanted == [NEXT]:
        with telling(console) as say:
            programs.find(programs.NEXT_KUBERNETES, say)
        return 0
    try:
        with telling(console) as say:
            paths: dict[str, Path] = {}
            for bundle in (*SET_UP, *OTHERS):
                if bundle.programs.keys() & set(wanted) or (not wanted and bundle in SET_UP):
                    paths |= programs.find(bundle, say)
    except LocalClusterError as error:
        console.print(f"{error}", soft_wrap=True, markup=False)
        return 1
    for name in wanted:
        print(paths[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
