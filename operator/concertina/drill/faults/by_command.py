"""Faults that are injected by commands of the cluster's administrator, because no API can kill a node.

Each fault has two commands, which two environment variables contain.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from concertina.drill.target import DrillTarget, Injection, ProgressSource
from concertina.terminal.cluster_connection import UserError

PREFIX = "CONCERTINA_DRILL_"
COMMAND_SECONDS = 120.0


@dataclass(frozen=True)
class ByCommand:
    """Fault that is injected and reverted by two commands.

    `inject` and `revert` are the names (without PREFIX) of the environment variables that contain the commands. In a
    command, `{node}` is replaced by a node of the job on which the operator does not run. `{operator}` is replaced by
    the name of the leading operator's pod, and `{operator_node}` by the node of that pod. `what` describes the fault.
    """

    inject: str
    revert: str
    what: str
    sight: ProgressSource = ProgressSource.ALL
    seconds: float = 0.0
    """Minimum duration of the fault in seconds."""

    def __call__(self, target: DrillTarget) -> AbstractAsyncContextManager[Injection]:
        return self._play(target)

    @property
    def given(self) -> bool:
        """True if the environment sets at least one of the two commands."""
        return any(os.environ.get(PREFIX + name) for name in (self.inject, self.revert))

    def commands(self) -> tuple[str, str]:
        """Return the command that injects the fault, and the command that reverts it.

        Raises:
            UserError: When a command is not set.
        """
        return _command(self.inject), _command(self.revert)

    @asynccontextmanager
    async def _play(self, target: DrillTarget) -> AsyncIterator[Injection]:
        inject, revert = self.commands()
        names = {"node": await target.victim_node()} if "{node}" in inject else {}
        if "{operator" in inject + self.what:
            operator = await target.operator()
            names |= {"operator": operator["metadata"]["name"], "operator_node": operator["spec"]["nodeName"]}
        at = time.time()
        try:
            await _run(inject, names)
            yield Injection(at, self.what.format(**names), self.sight)
            await asyncio.sleep(max(0.0, at + self.seconds - time.time()))
        finally:
            await _run(revert, names)


def _command(name: str) -> str:
    text = os.environ.get(PREFIX + name, "")
    if not text:
        raise UserError(
            f"No Kubernetes API can do this. Set {PREFIX}{name} to a command that does it on your cluster "
            "(docs/drills.md explains placeholders such as {node})."
        )
    return text


async def _run(command: str, names: Mapping[str, str]) -> None:
    """Run a command after replacing the placeholders in its words.

    Raises:
        UserError: When the command fails or takes too long. The message contains the command's output.
    """
    words = shlex.split(command)
    for name, value in names.items():
        words = [word.replace(f"{{{name}}}", value) for word in words]
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), COMMAND_SECONDS)
    except TimeoutError:
        process.kill()
        raise UserError(f"`{shlex.join(words)}` did not end within {COMMAND_SECONDS:g} s.") from None
    if process.returncode:
        raise UserError(f"`{shlex.join(words)}` failed: {output.decode(errors='replace').strip()[-500:]}")
