"""The agent's end of the channel to one process, on asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Optional

from concertina_protocol import MAX_LINE
from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.worker_channel.codec import Message, decode, encode


class AgentEnd:
    """The agent's end of one connection, on a plain socket.

    asyncio's streams can't be used: when a write fails, they discard data that were received before. This would lose
    the last message (Done) of a worker that exits while the agent writes to it (decision "Worker messages are read from
    a plain socket").
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket, self._loop = connection, asyncio.get_running_loop()
        self._arrived = self._leaving = b""
        self._closed = False

    @property
    def peer_pid(self) -> int:
        """Id of the process at the other end, as the kernel reports it."""
        size = struct.calcsize("3i")
        return int(struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0])

    async def receive(self) -> Optional[Message]:
        """Return the next message, or None after the process has closed the connection.

        Raises:
            ProtocolError: If a line is not a valid message, or is too long.
        """
        while b"\n" not in self._arrived:
            try:
                data = await self._loop.sock_recv(self._socket, 1 << 16)
            except OSError:
                data = b""
            if not data:
                return None
            self._arrived += data
            if len(self._arrived) > 2 * MAX_LINE:
                raise ProtocolError(f"a line exceeds the limit of {MAX_LINE} bytes")
        await asyncio.sleep(0)  # a process that sends all the time must not block the event loop
        line, _, self._arrived = self._arrived.partition(b"\n")
        return decode(line)

    def send(self, message: Message) -> None:
        """Send a message to the process at the other end. The message may be buffered and sent later.

        If the process has exited, the message is dropped. The agent learns of the exit when `receive` returns None.
        """
        if not self._closed:
            self._leaving += encode(message)
            self._flush()

    def close(self) -> None:
        """Close the connection, so that `receive` returns None. The caller of `receive` must then call `release`."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_writer(self._socket)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Free the connection and its socket, after `receive` has returned None."""
        self.close()
        self._socket.close()

    def _flush(self) -> None:
        try:
            while self._leaving:
                self._leaving = self._leaving[self._socket.send(self._leaving) :]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._flush)
            return
        except OSError:
            self._leaving = b""
        self._loop.remove_writer(self._socket)
