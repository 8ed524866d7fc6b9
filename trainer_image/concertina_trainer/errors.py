from concertina_protocol import FailureReason

"""What stops a worker, as a sentence for a person."""


class BadInput(Exception):
    """Trying again can't help: the message says what is wrong and what to do."""


class RestoreFailed(Exception):
    """The state could not be read; another source, or another try, may help."""


class RollBack(Exception):
    """What was trained since `step` is not to be trusted: the whole world goes back to a state of that step or before,
    and goes on with `skipped` samples left out (all that ever were, see `data.skips`)."""

    def __init__(self, reason: FailureReason, message: str, step: int, skipped: tuple[tuple[int, int], ...]) -> None:
        super().__init__(message)
        self.reason, self.step, self.skipped = reason, step, skipped
