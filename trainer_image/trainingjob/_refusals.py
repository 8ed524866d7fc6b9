"""Errors in saving or reading a state or data, which are reported to the job before they end the script."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from concertina_protocol import FailureReason
from concertina_protocol.worker_channel import Fault
from concertina_state.errors import DamagedInput, InvalidInput, RestoreFailed
from trainingjob import _connection

INSTEAD = "give the script the objects with which the state was saved, or use another checkpoint URI for a new run"
USE_PREVIOUS = "UsePrevious"
"""Value of `checkpoint.onDamage` with which the job continues from an older checkpoint."""


class NotSavable(InvalidInput, TypeError):
    """Error that an object of the script has no state, or a state that can't be saved."""


def check_not_in_run(framework: str) -> None:
    """Refuse a framework with process-wide state in a script whose process takes part in several rounds.

    Raises:
        InvalidInput: The script uses `trainingjob.run`.
    """
    channel = _connection.agent_channel()
    if channel is not None and channel.stays:
        with faults_reported():
            raise InvalidInput(
                f"{framework} does not work within trainingjob.run: call the script's function without it, and a new "
                "process starts for each round."
            )


@contextlib.contextmanager
def faults_reported() -> Iterator[None]:
    """Report errors that the `with` block raises to the agent, and raise them again.

    The operator then knows the reason for the failure before the process ends.

    Raises:
        InvalidInput: The `with` block has raised this error.
        RestoreFailed: The `with` block has raised this error.
    """
    try:
        yield
    except DamagedInput as damaged:
        error = _with_rollback(damaged)
        _report(error, error.reason, "" if error.rollback else _advice(error))
        raise error from (None if error is damaged else damaged)
    except InvalidInput as error:
        _report(error, error.reason)
        raise
    except RestoreFailed as error:
        _report(error, FailureReason.RESTORE_FAILED)
        raise


def _report(error: Exception, reason: FailureReason, advice: str = "") -> None:
    if channel := _connection.agent_channel():
        rollback = error.rollback if isinstance(error, DamagedInput) else None
        channel.send(Fault(reason, f"{error}{advice}", rollback))


def _with_rollback(damaged: DamagedInput) -> DamagedInput:
    """Return the error `damaged`, with a rollback added if `checkpoint.onDamage` requests one.

    Returns:
        The error `damaged`. If a rollback is requested and no other checkpoint is left, an error that ends the job.
    """
    channel, checkpoint = _connection.agent_channel(), _connection.checkpoint_settings()
    if channel is None or not damaged.checkpoint or checkpoint.get("onDamage") != USE_PREVIOUS:
        return damaged
    from concertina_state.checkpoints.rollback import before_damaged

    start = channel.start()
    try:
        damaged.rollback = before_damaged(damaged, checkpoint["uri"], start.uid, start.restore)
    except DamagedInput as none_left:
        return none_left
    return damaged


def _advice(damaged: DamagedInput) -> str:
    """Return a sentence that names another checkpoint to use instead of the damaged one."""
    from concertina_state.checkpoints.catalogue import instead_of

    return instead_of(damaged)
