"""Display of the progress of a long operation: the last message, and the time since the start."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_QUIET_LINES = 15.0  # seconds between lines where there is no terminal to redraw


@contextlib.contextmanager
def shown() -> Iterator[Callable[[str], None]]:
    """Yield a function say(text) that shows progress on stderr.

    On a terminal, it updates a single line with the elapsed time. Otherwise, it prints a line from time to time.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _ProgressLines().say
        return
    text = TextColumn(
        "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
    )
    with Progress(SpinnerColumn(), TimeElapsedColumn(), text, console=console, transient=True, expand=True) as bar:
        task = bar.add_task("starting")
        yield lambda line: bar.update(task, description=line)


class _ProgressLines:
    """Printer of progress messages, for output that is not a terminal.

    It prints the first message of each topic at once, and further messages of the topic only from time to time.
    """

    def __init__(self) -> None:
        self._begun = self._last = time.monotonic()
        self._topic = ""

    def say(self, text: str) -> None:
        now, topic = time.monotonic(), text.partition(":")[0]
        if topic == self._topic and now - self._last < _QUIET_LINES:
            return
        self._last, self._topic = now, topic
        print(f"[{now - self._begun:6.1f} s] {text}", file=sys.stderr, flush=True)
