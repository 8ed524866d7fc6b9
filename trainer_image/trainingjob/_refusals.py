"""What keeps a state or data from being read or saved, told to the job before it ends the script."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator

import trainingjob
from concertina_protocol import FailureReason
from concertina_protocol.worker_channel import Fault
from concertina_state.errors import BadInput, DamagedInput, RestoreFailed

INSTEAD = "give the script what it had, or another checkpoint URI for a new run"
USE_PREVIOUS = "UsePrevious"
"""Of checkpoint.onDamage."""


class NotSavable(BadInput, TypeError):
    """An object that has no state, or one that can't be kept."""


@contextlib.contextmanager
def told() -> Iterator[None]:
    try:
        yield
    except DamagedInput as damaged:
        error = _with_rollback(damaged)
        _tell(error, error.reason, "" if error.rollback else _instead_of(error))
        raise error from (None if error is damaged else damaged)
    except BadInput as error:
        _tell(error, error.reason)
        raise
    except RestoreFailed as error:
        _tell(error, FailureReason.RESTORE_FAILED)
        raise


def _tell(error: Exception, reason: FailureReason, advice: str = "") -> None:
    if channel := trainingjob.connection():
        rollback = error.rollback if isinstance(error, DamagedInput) else None
        channel.send(Fault(reason, f"{error}{advice}", rollback))


def _with_rollback(damaged: DamagedInput) -> DamagedInput:
    """Add the rollback that checkpoint.onDamage asks for. Returns what ends the run instead where no other checkpoint
    is left."""
    channel = trainingjob.connection()
    checkpoint = json.loads(os.environ.get("CONCERTINA_CHECKPOINT") or "null") or {}
    if channel is None or not damaged.checkpoint or checkpoint.get("onDamage") != USE_PREVIOUS:
        return damaged
    from concertina_state.checkpoints.rollback import before_damaged

    start = channel.start()
    try:
        damaged.rollback = before_damaged(damaged, checkpoint["uri"], start.uid, start.restore)
    except DamagedInput as none_left:
        return none_left
    return damaged


def _instead_of(damaged: DamagedInput) -> str:
    """The checkpoint to use instead, in a sentence."""
    from concertina_state.checkpoints.catalogue import instead_of

    return instead_of(damaged)
