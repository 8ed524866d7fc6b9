"""Exchange between replicas of the names of the modules that a user's script imports.

A warm start imports these modules before the script begins. A replica learns the names when it starts the script the
first time, and sends them to the other replicas. Without this exchange, the first start of each new pod would be slow,
and all other replicas would wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Optional

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.net.wire import Connector
from concertina_agent.runtime.nursery import TaskGroup
from concertina_agent.workers.warm_start import WarmStart
from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.log import log_event

AGAIN_SECONDS = 5.0
"""Seconds between two requests for modules.

Requests are repeated, because replicas that start together send them before any replica has learned modules.
"""
MOST_TIMES = 60


class ModuleLearning:
    """Exchange with other replicas of the names of the modules that the user's script imports."""

    def __init__(
        self,
        uid: str,
        warm: Optional[WarmStart],
        connector: Connector,
        emit: Callable[[e.Event], None],
        tasks: TaskGroup,
    ) -> None:
        """Prepare the exchange. `warm` is None if the user's command has no warm starts."""
        self._uid, self._warm, self._connector, self._emit, self._tasks = uid, warm, connector, emit, tasks
        self._asking: Optional[asyncio.Task[None]] = None

    def answer(self) -> p.Message:
        learned = self._warm.learned if self._warm is not None else None
        return learned or p.Refused("no imports have been recorded here yet", 0, "")

    def hear_of(self, address: str) -> None:
        """Request from another agent the modules that the script imports, unless this agent knows modules already.

        Call this method before the agent sends its next Report, because the Report must not say that this agent is
        ready while it still has modules to import.
        """
        if self._warm is None or self._warm.has_learned:
            return
        if self._asking is not None:
            self._asking.cancel()
        self._emit(e.Learning(True))
        self._asking = self._tasks.start("learn", self._ask(self._warm, address))

    async def _ask(self, warm: WarmStart, address: str) -> None:
        for _ in range(MOST_TIMES):
            answer = await self._answer_of(address)
            if isinstance(answer, p.Learned) and not warm.has_learned:
                log_event("learned", of=address, characters=len(answer.modules))
                await warm.take(answer)
            self._emit(e.Learning(False))
            if warm.has_learned:  # by now, possibly from a worker of this agent
                return
            await asyncio.sleep(AGAIN_SECONDS)

    async def _answer_of(self, address: str) -> Optional[p.Message]:
        try:
            return await self._connector.ask(address, p.Learn(self._uid))
        except (OSError, asyncio.TimeoutError, ProtocolError) as error:
            log_event("learned_nothing", of=address, why=str(error) or type(error).__name__)
            return None
