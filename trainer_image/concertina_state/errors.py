"""What keeps a state from being saved or restored, as a sentence for a person."""

from __future__ import annotations

from concertina_protocol import FailureReason, Rollback


class InvalidInput(Exception):
    """Trying again can't help: the message says what is wrong and what to do."""

    reason = FailureReason.INVALID_INPUT
    """By which alerts and runbooks know it."""


class DataChanged(InvalidInput):
    """A position in the data that the state was trained on is another sequence in those that there are."""

    reason = FailureReason.DATA_CHANGED


class DamagedInput(InvalidInput):
    """What is read is not what was written, however often it is read."""

    reason = FailureReason.DAMAGED

    def __init__(self, message: str, checkpoint: str = "") -> None:
        """`checkpoint`: the URI of the checkpoint's own folder; empty where data are damaged."""
        super().__init__(message)
        self.checkpoint = checkpoint
        self.rollback: Rollback | None = None
        """To an older checkpoint; None: the job ends."""


class RestoreFailed(Exception):
    """The state could not be read; another source, or another try, may help."""
