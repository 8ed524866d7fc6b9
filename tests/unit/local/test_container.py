"""Container whose node has no room for its files."""

import asyncio
import socket
from pathlib import Path

from concertina.local.node.node_status import ContainerState
from concertina.local.node.runtime.container import RunningContainer
from concertina.local.node.runtime.runtime_client import Running, RuntimeClient


def test_a_command_whose_output_can_be_kept_nowhere_has_failed(tmp_path: Path) -> None:
    (tmp_path / "containers").write_text("a file")

    async def play() -> tuple[int, str]:
        link, runtime = socket.socketpair()
        with link, runtime:
            container = RunningContainer(
                {"name": "main"}, tmp_path / "containers" / "main", RuntimeClient(link), ContainerState("main", "image")
            )
            container.running = Running()
            return await container.execute(["true"], timeout=10)

    code, said = asyncio.run(play())
    assert code == 126
    assert "Not a directory" in said
