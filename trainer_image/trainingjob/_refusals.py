"""What keeps a state or data from being read or saved, told to the job before it ends the script."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import trainingjob
from concertina_protocol import FailureReason
from concertina_protocol.worker_channel import Fault
from concertina_state.errors import BadInput, DamagedInput, RestoreFailed

INSTEAD = "give the script what it had, or another checkpoint URI for a new run"


class NotSavable(BadInput, TypeError):
    """An object that has no state, or one that can't be kept."""


def _instead_of(error: Exception) -> str:
    """The checkpoint to use instead of a damaged one, in a sentence."""
    if not isinstance(error, DamagedInput):
        return ""
    from concertina_state.checkpoints.catalogue import instead_of

    return instead_of(error)


@contextlib.contextmanager
def told() -> Iterator[None]:
    try:
        yield
    except (BadInput, RestoreFailed) as error:
        reason = error.reason if isinstance(error, BadInput) else FailureReason.RESTORE_FAILED
        if channel := trainingjob.connection():
            channel.send(Fault(reason, f"{error}{_instead_of(error)}"))
        raise
