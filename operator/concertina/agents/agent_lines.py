"""Limit on the memory for the lines (messages) of agents, from their arrival until the operator has processed them.

Decision "Size limits of lines from agents" gives the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from concertina_protocol import ProtocolError
from concertina_protocol.connection import Connection

MOST_HELD_BYTES = 16 << 20
"""Bytes of memory that one namespace's lines longer than PIECE_BYTES can use. Four lines of the largest size fit."""


class HeldLines:
    """Memory budget for long lines (messages), shared by all agents of one namespace.

    A line counts from the arrival of its first part until the operator has processed the line.
    """

    def __init__(self, most_bytes: int = MOST_HELD_BYTES) -> None:
        self._most_bytes = self._free_bytes = most_bytes

    def take(self, count: int) -> None:
        """Reserve `count` bytes of the namespace's memory budget for a line.

        Raises:
            ProtocolError: When fewer than `count` bytes are free.
        """
        if count > self._free_bytes:
            raise ProtocolError(f"a line beside others of its namespace that hold nearly {self._most_bytes} bytes")
        self._free_bytes -= count

    def give_back(self, count: int) -> None:
        """Return `count` bytes to the namespace's memory budget after the operator has processed a line."""
        self._free_bytes += count


class BoundedConnection(Connection):
    """Connection to an agent that limits the length of each line.

    A line counts against the memory budget until the next line is read or the connection is closed.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        most_line_bytes: Callable[[], int],
        held_lines: HeldLines,
    ) -> None:
        """Create the connection from the streams of an open TLS connection to an agent.

        Args:
            reader: Reader whose buffer limit is PIECE_BYTES.
            writer: Writer of the connection.
            most_line_bytes: Function that returns the current limit for a line in bytes.
            held_lines: Memory budget of the agent's namespace.
        """
        super().__init__(reader, writer)
        self._most_line_bytes = most_line_bytes
        self._held_lines = held_lines
        self._held_bytes = 0

    async def read_line(self) -> bytes:
        """Read one line (message) of the agent.

        Raises:
            ProtocolError: When the line is too long, or when the namespace's memory budget has too few bytes left for
                it.
        """
        self._give_back()
        piece = await self._read_piece()
        pieces, size = [piece], len(piece)
        while piece and not piece.endswith(b"\n"):
            if size > (most_bytes := self._most_line_bytes()):
                raise ProtocolError(f"a line exceeds the limit of {most_bytes} bytes")
            self._held_lines.take(size - self._held_bytes)
            self._held_bytes = size
            piece = await self._read_piece()
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)

    async def _read_piece(self) -> bytes:
        """Read up to the end of the line or of the stream.

        If a line is longer than the reader's buffer, return only the part that is in the buffer.
        """
        try:
            return await self.reader.readuntil()
        except asyncio.LimitOverrunError as error:
            return await self.reader.readexactly(error.consumed)
        except asyncio.IncompleteReadError as error:
            return error.partial

    def close(self) -> None:
        self._give_back()
        super().close()

    def _give_back(self) -> None:
        self._held_lines.give_back(self._held_bytes)
        self._held_bytes = 0
