"""Consoles on which commands print text from the cluster safely."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from concertina.terminal.characters import CONTROL, harmless


class HarmlessConsole(Console):
    """Console that replaces control characters in printed text. rich's own colours and cursor movements still work."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            harmful = segment.control is None and CONTROL.search(segment.text)
            yield Segment(harmless(segment.text), segment.style) if harmful else segment


def plain(width: int = 200, stderr: bool = False) -> Console:
    """Return a console that prints text without interpreting markup.

    Tenants of the cluster wrote much of the text, such as labels and the last lines of a script. Markup in such text
    could raise an error or hide content, and escape sequences could affect the user's terminal.

    Args:
        width: Width in characters if the output is not a terminal.
        stderr: Whether to print to stderr.
    """
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return HarmlessConsole(
        stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True, width=None if terminal else width
    )
