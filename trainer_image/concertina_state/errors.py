"""Errors that prevent a state from being saved or restored. Their messages are sentences for a person."""

from __future__ import annotations

from concertina_protocol import FailureReason, Rollback


class InvalidInput(Exception):
    """Error that occurs again if the operation is repeated. The message says what is wrong and what the user can do."""

    reason = FailureReason.INVALID_INPUT
    """Reason for this error in the job's status, by which alerts and runbooks identify it."""


class DataChanged(InvalidInput):
    """Error that the training data have changed since the saved state was trained.

    The sequences at the same positions in the data are now different ones.
    """

    reason = FailureReason.DATA_CHANGED


class DoesNotFit(InvalidInput):
    """Error that the model needs more memory than the devices have."""

    reason = FailureReason.DOES_NOT_FIT


class DamagedInput(InvalidInput):
    """Error that stored bytes differ from the bytes that were written.

    A retry is useless, because it reads the same wrong bytes again.
    """

    reason = FailureReason.DAMAGED

    def __init__(self, message: str, checkpoint: str = "") -> None:
        """Store the message, and the URI of the damaged checkpoint's folder.

        The URI is "" if training data are damaged.
        """
        super().__init__(message)
        self.checkpoint = checkpoint
        self.rollback: Rollback | None = None
        """Rollback to an older checkpoint, or None if the job must fail."""


class RestoreFailed(Exception):
    """Error that the state could not be read. Another source, or another attempt, may succeed."""
