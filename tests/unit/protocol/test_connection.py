"""Connections over real TLS."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from builders.answering import CREATED, LIMIT, MASTER, UID, agent, forever
from concertina.agents.authority import Authority
from concertina_protocol.connection import connect


@pytest.mark.parametrize(
    "closings",
    ["abort", "abort abort", "close abort", "abort close abort", "close close abort", "abort close close abort"],
)
def test_a_connection_can_be_closed_again(closings: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        context = Authority(MASTER, UID, CREATED).client_context()
        async with agent(forever, tmp_path) as address:
            connection = await connect(address, context, f"{UID}.agent")
            close = {"abort": connection.close, "close": connection.writer.close}
            for name in closings.split():
                close[name]()
            assert await connection.receive(LIMIT) is None
            assert connection.over

    asyncio.run(scenario())
