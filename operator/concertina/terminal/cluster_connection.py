"""Connection of a CLI command to its cluster, and conversion of errors to messages and exit statuses."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from concertina.terminal.characters import harmless

if TYPE_CHECKING:
    from concertina.kube.client import Client

T = TypeVar("T")
NOT_INSTALLED = (
    "This cluster has no TrainingJobs, because concertina is not installed in it: install the chart charts/concertina, "
    "or choose another cluster with --context or --kubeconfig."
)


class UserError(Exception):
    """Error that the user can correct. The message says how."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Cluster and namespace on which a command operates."""

    kubeconfig: Path | None
    context: str | None
    namespace: str | None

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[tuple[Client, str]]:
        """Connect to the cluster, and yield a client and the namespace in which the command operates."""
        from concertina.kube.access import load
        from concertina.kube.client import Client

        access = await load(str(self.kubeconfig) if self.kubeconfig else None, self.context)
        async with Client(access, give_up_after=5.0) as client:
            yield client, self.namespace or access.namespace


def call(command: Coroutine[Any, Any, int | None]) -> None:
    """Run a command's coroutine, and exit the process with the status that the coroutine returns.

    If the coroutine raises an expected error, the error message is printed and the exit status is 1.

    Raises:
        typer.Exit: Always, with the exit status.
    """
    import asyncio

    from concertina.kube.access import NoAccess
    from concertina.kube.errors import ApiError, NotServed

    try:
        code = asyncio.run(_ungrouped(command, (ApiError, NoAccess, UserError, BrokenPipeError)))
    except (ApiError, NoAccess, UserError) as error:
        message = NOT_INSTALLED if isinstance(error, NotServed) else f"{error}"
        typer.secho(harmless(message), err=True, fg=typer.colors.RED)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(code or 0)


async def _ungrouped(command: Coroutine[Any, Any, T], expected_types: tuple[type[Exception], ...]) -> T:
    """Run a command's coroutine, and replace a group of only expected errors by the first error of the group.

    Task groups raise such groups. BrokenPipeError counts as an expected error; typer handles it.

    Raises:
        ExceptionGroup: When an error in the group is not expected.
    """
    try:
        return await command
    except ExceptionGroup as group:
        if group.split(expected_types)[1] is not None:
            raise
        error = _first(group)
        raise error from None


def _first(error: Exception) -> Exception:
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error
