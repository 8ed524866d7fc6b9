"""From a command's options to a client, and from what goes wrong to one sentence and an exit status."""

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


class UserError(Exception):
    """Something that the caller can mend; the sentence says how."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Which cluster and namespace a command is about."""

    kubeconfig: Path | None
    context: str | None
    namespace: str | None

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[tuple[Client, str]]:
        """A client, and the namespace to use."""
        from concertina.kube.access import load
        from concertina.kube.client import Client

        access = await load(str(self.kubeconfig) if self.kubeconfig else None, self.context)
        async with Client(access, give_up_after=5.0) as client:
            yield client, self.namespace or access.namespace


def call(command: Coroutine[Any, Any, int | None]) -> None:
    """Runs a command to its end: its exit status, or 1 and a sentence."""
    import asyncio

    from concertina.kube.access import NoAccess
    from concertina.kube.errors import ApiError

    try:
        code = asyncio.run(_ungrouped(command, (ApiError, NoAccess, UserError, BrokenPipeError)))
    except (ApiError, NoAccess, UserError) as error:
        typer.secho(harmless(f"{error}"), err=True, fg=typer.colors.RED)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(code or 0)


async def _ungrouped(command: Coroutine[Any, Any, T], known: tuple[type[Exception], ...]) -> T:
    """Of what tasks of a group failed by, the first error alone, where all of it is known; a BrokenPipeError is typer's
    to end by."""
    try:
        return await command
    except ExceptionGroup as group:
        if group.split(known)[1] is not None:
            raise
        raise _first(group) from None


def _first(error: Exception) -> Exception:
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error
