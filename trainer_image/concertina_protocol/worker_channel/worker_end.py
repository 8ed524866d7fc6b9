"""End of the channel in a worker, an uploader or a script. Calls block, so no event loop is needed."""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
from typing import Deque, List, Type, TypeVar

from concertina_protocol.worker_channel.codec import Message, decode, encode

FINISH_SECONDS = 5.0
"""Maximum seconds that a process waits, after its last message, until the agent has read that message."""
T = TypeVar("T")


class ChannelClosed(ConnectionError):
    """Error that the agent has closed the channel."""


class WorkerEnd:
    """End of the channel in a worker, an uploader or a script.

    Any thread may send messages, and one thread receives.
    """

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._partial = b""
        self._sending = threading.Lock()
        self._received: Deque[Message] = collections.deque()

    def send(self, message: Message) -> None:
        """Send a message from any thread.

        Raises:
            ChannelClosed: If the agent is gone.
        """
        try:
            with self._sending:
                self._socket.sendall(encode(message))
        except OSError as error:
            raise ChannelClosed("the agent closed its end") from error

    def receive(self, kind: Type[T]) -> T:
        """Wait for the next message of the class `kind`.

        Messages of other classes that arrive before it are returned by `poll`.
        """
        while True:
            for message in self._received:
                if isinstance(message, kind):
                    self._received.remove(message)
                    return message
            self._read(wait=True)

    def request(self, message: Message, kind: Type[T]) -> T:
        """Send a message and wait for the answer, which is the next message of the class `kind`."""
        self.send(message)
        return self.receive(kind)

    def poll(self) -> List[Message]:
        """Return the messages that have arrived, without waiting for more."""
        self._read(wait=False)
        messages = list(self._received)
        self._received.clear()
        return messages

    def finish(self) -> None:
        """Wait until the agent has read all messages.

        Call this method before the process exits; nothing can be sent afterwards.

        Without this call, messages that the agent has not read yet are lost if the agent writes to the process after
        the process has exited.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(FINISH_SECONDS)
            while self._socket.recv(1 << 16):
                pass
        self._socket.close()

    def _read(self, wait: bool) -> None:
        """Read all data that have arrived on the connection.

        If `wait` is set, wait until there is at least one whole line.

        Raises:
            ChannelClosed: If the agent is gone.
        """
        flags = 0 if wait else socket.MSG_DONTWAIT
        while True:
            try:
                data = self._socket.recv(1 << 16, flags)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed("the agent closed its end") from error
            if not data:
                raise ChannelClosed("the agent closed its end")
            *lines, self._partial = (self._partial + data).split(b"\n")
            self._received.extend(decode(line) for line in lines)
            if lines or not wait:
                flags = socket.MSG_DONTWAIT
