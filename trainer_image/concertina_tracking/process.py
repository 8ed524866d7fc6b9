"""Process that sends the run's records to the tool that tracks the run.

The coordinator is the agent of rank 0. A coordinator's agent starts this process. The process exits when its agent
exits. It also exits when another replica has become the coordinator and all records of this replica have been sent.
Training does not wait for this process, so the process can wait for a slow tool as long as necessary.
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
"""Seconds between two reads of the spool if the last read found nothing new."""
BACKOFF = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between attempts to reach the tool after errors. The last value is repeated."""
NICENESS = 10
PACKAGES = {Backend.MLFLOW: "mlflow-skinny", Backend.WANDB: "wandb", Backend.TENSORBOARD: "tensorboard"}
"""Python package that the user's image must contain, for each tool."""


def main() -> NoReturn:
    """Send records to the tracking tool until all are sent and no more can come, or until an error rules out a retry.

    The exit code is 0 if all records are sent or the agent has exited. It is 78 if the image lacks the tool. The last
    TrackingState message gives the reason.
    """
    os.nice(NICENESS)
    channel = WorkerEnd(os.environ["CONCERTINA_SOCKET"])
    channel.send(TrackerHello(os.getpid()))
    try:
        code = _ship(channel, settings.read(os.environ))
    except ChannelClosed:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without cleanup, because threads of the tool may hang


def start(settings: TrackingSettings, description: About) -> Tracker:
    """Start the run in the tool, or resume it.

    Errors of the tool itself are raised too.

    Raises:
        ImportError: When the image lacks the tool.
    """
    if settings.backend is Backend.MLFLOW:
        from concertina_tracking.trackers.mlflow import MlflowRun

        return MlflowRun(settings, description)
    if settings.backend is Backend.WANDB:
        from concertina_tracking.trackers.wandb import WandbRun

        return WandbRun(settings, description)
    from concertina_tracking.trackers.tensorboard import TensorBoardRun

    return TensorBoardRun(settings, description)


def _ship(channel: WorkerEnd, tracking_settings: TrackingSettings) -> int:
    description = about(os.environ)
    environment = ", ".join(
        f"{name} {value}" for name, value in description.code.items() if name in ("python", "torch")
    )
    spool = SpoolReader(tracking_settings.spool)
    shipper = Shipper(spool, lambda: start(tracking_settings, description), made_of, environment)
    ending, failures, reported_state = False, 0, TrackingState(-1)
    while True:
        wait, error = LOOK_SECONDS, ""
        try:
            wait = 0.0 if shipper.ship() else LOOK_SECONDS
            failures = 0
        except ImportError as missing:
            package = PACKAGES[tracking_settings.backend]
            error = (
                f"{missing}: install {package} in the image, or set spec.tracking.backend to None to turn tracking off"
            )
            channel.send(TrackingState(spool.next, error, spool.dropped))
            channel.finish()
            return BAD_INPUT_EXIT
        except Exception as trouble:  # a tool can raise any error: report the error and try again
            error = f"{tracking_settings.backend.value}: {type(trouble).__name__}: {trouble}"[:500]
            wait = BACKOFF[min(failures, len(BACKOFF) - 1)]
            failures += 1
        if (state := TrackingState(spool.next, error, spool.dropped)) != reported_state:
            reported_state = state
            channel.send(state)
        began = time.monotonic()
        while True:
            ending = ending or any(isinstance(message, ShipAll) for message in channel.poll())
            if (ending or shipper.idle) and spool.behind == 0 and not error:
                shipper.close()
                channel.finish()
                return 0
            soon = min(wait, LOOK_SECONDS) if ending else wait  # the agent will not wait long
            if (remaining_seconds := began + soon - time.monotonic()) <= 0:
                break
            time.sleep(min(remaining_seconds, 0.2))
