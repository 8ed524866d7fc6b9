"""Write docs/pictures/status.svg: the screen of `concertina status` for the job in tools/status_picture.json.

The picture shows what the code prints at the recorded time, so it is the same whenever it is made.
Run `python -m tools.status_picture` after a change of the screen.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from unittest import mock

from rich.console import Console

from concertina.api.status import unix_seconds
from concertina.terminal import show

PICTURE = Path(__file__).resolve().parents[1] / "docs/pictures/status.svg"
RECORD = Path(__file__).with_suffix(".json")
"""The time of the recording, the job's object and its events."""
WIDTH = 118
"""Columns of the terminal."""


def picture() -> str:
    """Return the screen as SVG."""
    record = json.loads(RECORD.read_text())
    console = Console(
        file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor", _environ={}
    )
    with mock.patch("time.time", return_value=unix_seconds(record["at"])):
        console.print(show.detail(record["job"], record["events"]))
    return console.export_svg(title="concertina status first", unique_id="status")


if __name__ == "__main__":
    PICTURE.write_text(picture())
