"""The end of the channel that a worker, an uploader or a script holds: blocking, no event loop."""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
from typing import Deque, List, Type, TypeVar

from concertina_protocol.worker_channel.codec import Message, decode, encode

FINISH_SECONDS = 5.0
"""How long a process that has said its last waits for the agent to have read it."""
T = TypeVar("T")


class ChannelClosed(ConnectionError):
    """The agent is gone."""


class WorkerEnd:
    """Any thread may send, one reads."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._partial = b""
        self._sending = threading.Lock()
        self._received: Deque[Message] = collections.deque()

    def send(self, message: Message) -> None:
        """From any thread. Raises ChannelClosed when the agent is gone."""
        try:
            with self._sending:
                self._socket.sendall(encode(message))
        except OSError as error:
            raise ChannelClosed("the agent closed its end") from error

    def receive(self, kind: Type[T]) -> T:
        """Wait for the next message of this kind; others that come before it are kept for `poll`."""
        while True:
            for message in self._received:
                if isinstance(message, kind):
                    self._received.remove(message)
                    return message
            self._read(wait=True)

    def request(self, message: Message, kind: Type[T]) -> T:
        """Send and wait for the answer."""
        self.send(message)
        return self.receive(kind)

    def poll(self) -> List[Message]:
        """What has arrived, without waiting."""
        self._read(wait=False)
        messages = list(self._received)
        self._received.clear()
        return messages

    def finish(self) -> None:
        """Say no more, and wait until the agent has read all that was said: without this it could be lost, when the
        agent writes to a process that has just ended."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(FINISH_SECONDS)
            while self._socket.recv(1 << 16):
                pass
        self._socket.close()

    def _read(self, wait: bool) -> None:
        """Read once when `wait`, then as long as there is something to read."""
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
