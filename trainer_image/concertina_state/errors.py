"""Errors that prevent a state from being saved or restored. Their messages are sentences for a person."""

from __future__ import annotations

from concertina_protocol import FailureReason, Rollback


class InvalidInput(Exception):
    """Error that will occur again if the operation is repeated. The message says what is wrong and what to do."""

    reason = FailureReason.INVALID_INPUT
    """Reason for this error in the job's status, by which alerts and runbooks identify it."""


class DataChanged(InvalidInput):
    """Error that the training data differ from those that the saved state was trained on.

    The same position in the data is a different sequence now.
    """

    reason = FailureReason.DATA_CHANGED


class DamagedInput(InvalidInput):
    """Error that stored bytes are not those that were written. Reading them again gives the same wrong bytes."""

    reason = FailureReason.DAMAGED

    def __init__(self, message: str, checkpoint: str = "") -> None:
        """Set the message and the URI of the damaged checkpoint's own folder.

        The URI is empty if training data are damaged.
        """
        super().__init__(message)
        self.checkpoint = checkpoint
        self.rollback: Rollback | None = None
        """Rollback to an older checkpoint, or None if the job must fail."""


class RestoreFailed(Exception):
    """Error that the state could not be read. Another source, or another attempt, may succeed."""
