"""Where commands print."""

from __future__ import annotations

import sys

from rich.console import Console


def plain(width: int = 200, stderr: bool = False) -> Console:
    """Shows what it is given as it is: much of it was written by others, a script's last words or a label, and rich's
    own marks in it would raise or hide something. `width`: characters where it is no terminal."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(
        stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True, width=None if terminal else width
    )
