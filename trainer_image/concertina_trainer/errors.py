"""What makes a world go back."""

from concertina_protocol import FailureReason


class RollBack(Exception):
    """What was trained since `step` is not to be trusted: the whole world goes back to a state of that step or before,
    and goes on with `skipped` samples left out (all that ever were, see `data.skips`)."""

    def __init__(self, reason: FailureReason, message: str, step: int, skipped: tuple[tuple[int, int], ...]) -> None:
        super().__init__(message)
        self.reason, self.step, self.skipped = reason, step, skipped
