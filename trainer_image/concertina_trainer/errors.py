"""Errors that make a world go back to an earlier state."""

from concertina_protocol import FailureReason


class RollBack(Exception):
    """The training since `step` can't be trusted.

    The whole world goes back to a state of that step or before, and continues without the `skipped` samples (all
    samples that were ever skipped, see `data.skips`).
    """

    def __init__(self, reason: FailureReason, message: str, step: int, skipped: tuple[tuple[int, int], ...]) -> None:
        super().__init__(message)
        self.reason, self.step, self.skipped = reason, step, skipped
