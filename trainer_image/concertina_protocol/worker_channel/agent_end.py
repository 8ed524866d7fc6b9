"""The end of the channel that the agent holds, one per connection, on asyncio."""

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
    """On a plain socket: asyncio's streams give up what has arrived when a write fails, and a worker's last message
    (Done) often crosses one to it (decision "The worker channel's agent end is a plain socket")."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket, self._loop = connection, asyncio.get_running_loop()
        self._arrived = self._leaving = b""
        self._closed = False

    @property
    def peer_pid(self) -> int:
        """The kernel's word for who is at the other end."""
        size = struct.calcsize("3i")
        return int(struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0])

    async def receive(self) -> Optional[Message]:
        """The next message; None when the process has said its last. Raises ProtocolError for a line that is none."""
        while b"\n" not in self._arrived:
            try:
                data = await self._loop.sock_recv(self._socket, 1 << 16)
            except OSError:
                data = b""
            if not data:
                return None
            self._arrived += data
            if len(self._arrived) > 2 * MAX_LINE:
                raise ProtocolError(f"a line over the limit of {MAX_LINE} bytes")
        await asyncio.sleep(0)  # who always has more to say keeps nobody else waiting
        line, _, self._arrived = self._arrived.partition(b"\n")
        return decode(line)

    def send(self, message: Message) -> None:
        """Buffered; what is sent to a process that is gone is dropped (its exit is noticed elsewhere)."""
        if not self._closed:
            self._leaving += encode(message)
            self._flush()

    def close(self) -> None:
        """`receive` ends; whoever waits in it then calls `release`."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_writer(self._socket)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
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
