"""Tracking of a run in TensorBoard's event files.

If steps are trained again, the new values replace the earlier ones: when a session starts at a step, TensorBoard
discards that step and all later ones of earlier sessions.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlparse

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from concertina_protocol.tracking.tracking_records import Checkpointed, RunOutcome, StepDone
from concertina_tracking.about import About
from concertina_tracking.settings import TrackingSettings

MARKER = "round"
"""Name of a scalar that each step has. It shows which steps are logged."""
NEVER_PURGED = 0
"""Step at which texts are written. Sessions start at step 1 or later, so TensorBoard never discards texts."""


class TensorBoardRun:
    """Run that is tracked in event files of TensorBoard."""

    def __init__(self, settings: TrackingSettings, about: About) -> None:
        """Create the folder, and write the description of the run.

        Raises:
            OSError: If the folder cannot be written.
        """
        self._folder = folder_of(settings)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(self._folder))
        tables = {"parameters": about.parameters, "code": about.code, "tags": settings.tags}
        for name, table in tables.items():
            if table:
                self.annotate(name, _markdown(table))

    def go_on(self, step: int, *, latest: bool) -> Collection[int]:
        if not latest:
            return frozenset(logged_step for logged_step in _steps(self._folder) if logged_step > step)
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))
        self._writer.flush()
        return ()

    def log(self, steps: Sequence[StepDone]) -> None:
        for step in steps:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in step.metrics.items()]
            self._writer.add_event(Event(wall_time=step.at, step=step.step, summary=Summary(value=values)))
        self._writer.flush()

    def annotate(self, name: str, text: str) -> None:
        summary = text_pb(name.replace(".", "/"), text)
        self._writer.add_event(Event(wall_time=time.time(), step=NEVER_PURGED, summary=summary))
        self._writer.flush()

    def reference(self, checkpoint: Checkpointed, made_of: Mapping[str, str]) -> None:
        self.annotate(f"checkpoint.{checkpoint.step}", _markdown({"uri": checkpoint.uri, **made_of}))

    def end(self, outcome: RunOutcome) -> None:
        self.annotate("outcome", outcome.value)

    def close(self) -> None:
        self._writer.close()


def folder_of(settings: TrackingSettings) -> Path:
    """Return the folder of the job's run. TensorBoard distinguishes runs by their folders."""
    parsed = urlparse(settings.uri)
    root = Path(unquote(parsed.path) if parsed.scheme == "file" else settings.uri)
    return root / settings.experiment / f"{settings.run_name}-{settings.run_id[:8]}"


def _steps(folder: Path) -> set[int]:
    """Return the steps that the event files in `folder` contain."""
    steps: set[int] = set()
    for path in sorted(folder.glob("*.tfevents.*")):
        for line in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(line)
            if event.session_log.status == SessionLog.START:
                steps = {step for step in steps if step < event.step}
            elif any(value.tag == MARKER for value in event.summary.value):
                steps.add(event.step)
    return steps


def _markdown(table: Mapping[str, str]) -> str:
    rows = "\n".join(f"| {name} | {value.replace('|', '&#124;')} |" for name, value in table.items())
    return f"| | |\n|---|---|\n{rows}"
