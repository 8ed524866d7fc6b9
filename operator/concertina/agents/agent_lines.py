"""Memory for the lines of agents until they are read.

See the decision "Lines of agents have as many bytes as their job needs".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from concertina_protocol import ProtocolError
from concertina_protocol.connection import Connection

MOST_HELD_BYTES = 16 << 20
"""Limit of the bytes of one namespace's lines that are longer than PIECE_BYTES: up to four of the largest lines."""


class HeldLines:
    """Memory budget that the long lines of one namespace's agents share.

    It counts incomplete lines, and lines that wait for their turn.
    """

    def __init__(self, most_bytes: int = MOST_HELD_BYTES) -> None:
        self._most_bytes = self._free_bytes = most_bytes

    def take(self, count: int) -> None:
        """Reserve that many bytes.

        Raises:
            ProtocolError: When fewer bytes are free.
        """
        if count > self._free_bytes:
            raise ProtocolError(f"a line beside others of its namespace that hold nearly {self._most_bytes} bytes")
        self._free_bytes -= count

    def give_back(self, count: int) -> None:
        """Return that many bytes to the budget."""
        self._free_bytes += count


class BoundedConnection(Connection):
    """Connection to an agent with bounded lines.

    A line counts against the budget until the next one is read, or until the connection is closed.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        most_line_bytes: Callable[[], int],
        held_lines: HeldLines,
    ) -> None:
        """Wrap the streams of an open connection.

        Args:
            reader: Reader whose limit is PIECE_BYTES.
        """
        super().__init__(reader, writer)
        self._most_line_bytes = most_line_bytes
        self._held_lines = held_lines
        self._held_bytes = 0

    async def read_line(self) -> bytes:
        """Read one line.

        Raises:
            ProtocolError: When the line is over the limit, or the namespace has no memory left for it.
        """
        self._give_back()
        piece = await self._read_piece()
        pieces, size = [piece], len(piece)
        while piece and not piece.endswith(b"\n"):
            if size > (most_bytes := self._most_line_bytes()):
                raise ProtocolError(f"a line over the limit of {most_bytes} bytes")
            self._held_lines.take(size - self._held_bytes)
            self._held_bytes = size
            piece = await self._read_piece()
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)

    async def _read_piece(self) -> bytes:
        """Read to the end of the line or of the stream, or as much of a longer line as the reader has buffered."""
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
