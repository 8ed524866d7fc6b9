"""Faults by commands of whoever runs the cluster: no API kills a node. Each pair is given in environment variables."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from concertina.drill.target import DrillTarget, Injection
from concertina.terminal.connection import Complaint

PREFIX = "CONCERTINA_DRILL_"
COMMAND_SECONDS = 120.0


@dataclass(frozen=True)
class ByCommand:
    """A fault whose two commands, to hurt and to heal, stand in variables of these names (after PREFIX).

    `{node}` in them is replaced by the name of the node; `what` says in words what was done."""

    hurt: str
    heal: str
    what: str
    watched: bool = True
    seconds: float = 0.0
    """How long it lasts at least."""

    def __call__(self, target: DrillTarget) -> AbstractAsyncContextManager[Injection]:
        return self._play(target)

    def commands(self) -> tuple[str, str]:
        """To hurt and to heal. Raises Complaint where one is not given."""
        return _command(self.hurt), _command(self.heal)

    @asynccontextmanager
    async def _play(self, target: DrillTarget) -> AsyncIterator[Injection]:
        hurt, heal = self.commands()
        node = await target.victim_node() if "{node}" in hurt else ""
        at = time.time()
        try:
            await _run(hurt, node)
            yield Injection(at, self.what.format(node=node), self.watched)
            await asyncio.sleep(max(0.0, at + self.seconds - time.time()))
        finally:
            await _run(heal, node)


def _command(name: str) -> str:
    text = os.environ.get(PREFIX + name, "")
    if not text:
        raise Complaint(
            f"No API does this: set {PREFIX}{name} to the command that does it on your cluster "
            "({node} in it stands for the node's name)."
        )
    return text


async def _run(command: str, node: str) -> None:
    """Raises Complaint with its output where it fails."""
    words = [word.replace("{node}", node) for word in shlex.split(command)]
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), COMMAND_SECONDS)
    except TimeoutError:
        process.kill()
        raise Complaint(f"`{shlex.join(words)}` did not end within {COMMAND_SECONDS:g} s.") from None
    if process.returncode:
        raise Complaint(f"`{shlex.join(words)}` failed: {output.decode(errors='replace').strip()[-500:]}")
