"""Where commands print."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from concertina.terminal.characters import CONTROL, harmless


class HarmlessConsole(Console):
    """Prints no control characters of texts. Colours and cursor movements are rich's own, and stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            harmful = segment.control is None and CONTROL.search(segment.text)
            yield Segment(harmless(segment.text), segment.style) if harmful else segment


def plain(width: int = 200, stderr: bool = False) -> Console:
    """Show texts as they are. Tenants wrote many of them, such as a script's last words or a label: rich's markup in
    them would raise or hide something, and escape sequences would reach the reader's terminal.

    `width`: characters where it is no terminal."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return HarmlessConsole(
        stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True, width=None if terminal else width
    )
