"""The process that ships records to the tracker.

A coordinator's agent starts it. It ends with that agent, or when another replica coordinates and all is shipped.
It may wait for a slow tracker as long as it likes: whoever trains does not wait for it.
"""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

from concertina_protocol.tracking.spool import SpoolReader
from concertina_protocol.worker_channel import (
    BAD_INPUT_EXIT,
    ChannelClosed,
    ShipAll,
    TrackerHello,
    TrackingState,
    WorkerEnd,
)
from concertina_tracking import settings
from concertina_tracking.about import About, about
from concertina_tracking.settings import Backend, TrackingSettings
from concertina_tracking.shipper import Shipper
from concertina_tracking.tracked_lineage import made_of
from concertina_tracking.tracker import Tracker

LOOK_SECONDS = 1.0
"""Between looks at the spool, where nothing was new."""
BACKOFF = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between tries while the tracker is in trouble."""
NICENESS = 10
PACKAGES = {Backend.MLFLOW: "mlflow-skinny", Backend.WANDB: "wandb", Backend.TENSORBOARD: "tensorboard"}
"""What the image has to hold."""


def main() -> NoReturn:
    """Exits 0 when nothing is left to do, 78 where trying again can't help (the last state says why)."""
    os.nice(NICENESS)
    channel = WorkerEnd(os.environ["CONCERTINA_SOCKET"])
    channel.send(TrackerHello(os.getpid()))
    try:
        code = _ship(channel, settings.read(os.environ))
    except ChannelClosed:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: a tool's threads may hang


def start(known: TrackingSettings, described: About) -> Tracker:
    """The run. Raises ImportError where the image lacks the tool, else what the tool raises."""
    if known.backend is Backend.MLFLOW:
        from concertina_tracking.trackers.mlflow import MlflowRun

        return MlflowRun(known, described)
    if known.backend is Backend.WANDB:
        from concertina_tracking.trackers.wandb import WandbRun

        return WandbRun(known, described)
    from concertina_tracking.trackers.tensorboard import TensorBoardRun

    return TensorBoardRun(known, described)


def _ship(channel: WorkerEnd, known: TrackingSettings) -> int:
    described = about(os.environ)
    environment = ", ".join(f"{name} {value}" for name, value in described.code.items() if name in ("python", "torch"))
    spool = SpoolReader(known.spool)
    shipper = Shipper(spool, lambda: start(known, described), made_of, environment)
    ending, failures, told = False, 0, TrackingState(-1)
    while True:
        wait, error = LOOK_SECONDS, ""
        try:
            wait = 0.0 if shipper.ship() else LOOK_SECONDS
            failures = 0
        except ImportError as missing:
            error = f"{missing}: install {PACKAGES[known.backend]} in the image, or set spec.tracking.backend to None"
            channel.send(TrackingState(spool.next, error, spool.dropped))
            channel.finish()
            return BAD_INPUT_EXIT
        except Exception as trouble:  # whatever a tool raises: it is told, and tried again
            error = f"{known.backend.value}: {type(trouble).__name__}: {trouble}"[:500]
            wait = BACKOFF[min(failures, len(BACKOFF) - 1)]
            failures += 1
        if (state := TrackingState(spool.next, error, spool.dropped)) != told:
            told = state
            channel.send(state)
        began = time.monotonic()
        while True:
            ending = ending or any(isinstance(message, ShipAll) for message in channel.poll())
            if (ending or shipper.idle) and spool.behind == 0 and not error:
                shipper.close()
                channel.finish()
                return 0
            soon = min(wait, LOOK_SECONDS) if ending else wait  # little time is left then
            if (left := began + soon - time.monotonic()) <= 0:
                break
            time.sleep(min(left, 0.2))
