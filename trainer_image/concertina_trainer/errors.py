"""Errors that make all ranks go back to an earlier state."""

from concertina_protocol import FailureReason


class RollBack(Exception):
    """Error that the training since step `step` can't be trusted.

    All ranks return to a saved state of that step or an earlier one. Training then continues without the samples
    `skipped`, which include all samples that the run has skipped before (see `data.skips`).
    """

    def __init__(self, reason: FailureReason, message: str, step: int, skipped: tuple[tuple[int, int], ...]) -> None:
        super().__init__(message)
        self.reason, self.step, self.skipped = reason, step, skipped
