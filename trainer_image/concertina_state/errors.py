"""Errors that prevent a state from being saved or restored. Their messages are sentences for a person."""

from __future__ import annotations

from concertina_protocol import FailureReason, Rollback


class InvalidInput(Exception):
    """Error that a retry can't resolve. The message says what is wrong and what to do."""

    reason = FailureReason.INVALID_INPUT
    """Reason by which alerts and runbooks identify the error."""


class DataChanged(InvalidInput):
    """A position in the data that the state was trained on is a different sequence in the data that are there now."""

    reason = FailureReason.DATA_CHANGED


class DoesNotFit(InvalidInput):
    """The model needs more memory than the devices have."""

    reason = FailureReason.DOES_NOT_FIT


class DamagedInput(InvalidInput):
    """Bytes that differ from what was written, however often they are read."""

    reason = FailureReason.DAMAGED

    def __init__(self, message: str, checkpoint: str = "") -> None:
        """Set the message and the URI of the damaged checkpoint's own folder, which is empty if data are damaged."""
        super().__init__(message)
        self.checkpoint = checkpoint
        self.rollback: Rollback | None = None
        """Rollback to an older checkpoint; None if the job ends."""


class RestoreFailed(Exception):
    """The state could not be read. Another source, or another attempt, may succeed."""
