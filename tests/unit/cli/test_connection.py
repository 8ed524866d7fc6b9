"""Exit of a command by the error that occurs in it."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from concertina.kube.access import NoAccess
from concertina.kube.errors import Forbidden, from_status
from concertina.terminal.cluster_connection import UserError, call


async def in_tasks(*errors: Exception) -> None:
    """Raise the errors all at once, each in a task of a group within another group."""

    async def fail(error: Exception) -> None:
        raise error

    async with asyncio.TaskGroup() as outer:

        async def inner() -> None:
            async with asyncio.TaskGroup() as tasks:
                for error in errors:
                    tasks.create_task(fail(error))

        outer.create_task(inner())


def ended_by(*errors: Exception) -> Result:
    app = typer.Typer()

    @app.command()
    def command() -> None:
        call(in_tasks(*errors))

    return CliRunner().invoke(app)


@pytest.mark.parametrize(
    "error", [UserError("It is so."), NoAccess("It is so."), Forbidden(403, "Forbidden", "It is so.")]
)
def test_what_goes_wrong_in_a_task_is_one_sentence_and_exit_1(error: Exception) -> None:
    for errors in ((error,), (error, UserError("It was so, too."))):
        done = ended_by(*errors)
        assert (done.exit_code, done.stdout, done.stderr) == (1, "", "It is so.\n")


def test_a_cluster_without_the_crd_is_named_as_such() -> None:
    """The API server answers with a plain text for an API that it does not serve, and with a Status for an object."""
    done = ended_by(from_status(404, b"404 page not found\n"))
    assert done.exit_code == 1
    assert "concertina is not installed in it: install the chart" in done.stderr
    status = b'{"kind": "Status", "code": 404, "reason": "NotFound", "message": "trainingjobs \\"a\\" not found"}'
    assert ended_by(from_status(404, status)).stderr == 'trainingjobs "a" not found\n'


def test_whoever_reads_no_more_hears_no_more() -> None:
    closed = BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    done = ended_by(closed, closed)
    assert isinstance(done.exception, SystemExit)
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", "")


def test_what_nobody_foresaw_is_told_whole() -> None:
    done = ended_by(UserError("It is so."), ZeroDivisionError("no sentence"))
    assert isinstance(done.exception, ExceptionGroup)
