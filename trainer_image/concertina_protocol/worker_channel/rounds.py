"""Rounds of one worker process: the channel through which the bundled trainer or a script enters and leaves rounds.

A round is a period in which a fixed set of replicas trains. The agent's message Leave can arrive while the main thread
waits in a collective for a rank that is gone. Another thread therefore reads the channel. When Leave arrives, that
thread aborts the process groups, so that the main thread's collectives raise an error. From then on, no message of the
round leaves the process: each use of the channel raises RoundLeft, in any thread.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import TypeVar

from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.worker_channel.codec import Message
from concertina_protocol.worker_channel.worker_end import ChannelClosed, WorkerEnd
from concertina_protocol.worker_channel.worker_messages import Enter, Hello, Leave, Left

ABORT_SECONDS = 0.01
"""Seconds between two aborts of the process groups.

Aborts are repeated, because the main thread may be creating a process group during the first abort.
"""
CLOSED = "the agent closed its end"
T = TypeVar("T")


def _keep(message: Message) -> bool:
    return False


class RoundLeft(BaseException):
    """Exception: the agent has ended the round.

    The class does not derive from Exception, so that no `except Exception` in the trainer or in a script catches it.

    A round is a period in which a fixed set of replicas trains.
    """


class RoundChannel:
    """Channel from a worker to its agent, which the worker uses in one round after another.

    A round is a period in which a fixed set of replicas trains.
    """

    def __init__(self, end: WorkerEnd, abort: Callable[[], None]) -> None:
        """Start the thread that reads the channel. That thread calls `abort` to abort all process groups."""
        self._end, self._abort = end, abort
        self.changed = threading.Condition()
        """Condition that guards all fields of this object, and the data that `handle` changes."""
        self._messages: collections.deque[Message] = collections.deque()
        self._handle: Callable[[Message], bool] = _keep
        self._round: int | None = None
        """Number of the round that the main thread is in, or None between rounds."""
        self._over = False
        """True if the round has ended. Messages of this round may then no longer be sent."""
        self._last_left = -1
        """Number of the latest round that the agent has ended, or -1."""
        self.closed = False
        """True if the agent has closed its end of the channel."""
        threading.Thread(target=self._read, name="channel", daemon=True).start()

    # --- within a round

    def check(self) -> None:
        """Raise an error if the round has ended.

        Raises:
            RoundLeft: When the round has ended.
        """
        if self._over:
            raise RoundLeft

    def send(self, message: Message) -> None:
        """Send a message of the round. Any thread may call this method.

        Raises:
            RoundLeft: When the round has ended.
        """
        self.check()
        self._end.send(message)

    def poll(self) -> list[Message]:
        """Return the messages that have arrived, without waiting.

        Raises:
            RoundLeft: When the round has ended.
            ChannelClosed: When the agent has closed its end.
        """
        self.check()
        with self.changed:
            if self.closed:
                raise ChannelClosed(CLOSED)
            messages = list(self._messages)
            self._messages.clear()
        return messages

    def receive(self, kind: type[T]) -> T:
        """Wait for the next message of type `kind`, and return it. Messages of other types are kept for `poll`."""
        return self._receive(kind, self.check)

    def request(self, message: Message, kind: type[T]) -> T:
        """Send a message, and wait for the answer, which is the next message of type `kind`."""
        self.send(message)
        return self.receive(kind)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds` returns True, or until the agent has closed its end.

        `holds` is a condition on data that the function `handle` changes.

        Raises:
            RoundLeft: When the round ends first.
        """
        with self.changed:
            while not holds() and not self.closed:
                self.check()
                self.changed.wait()

    # --- between rounds

    def enter(self, round: int, hello: Hello, handle: Callable[[Message], bool] = _keep) -> None:
        """Enter a round. The agent may have ended the round already.

        Args:
            round: Number of the round.
            hello: First message to the agent.
            handle: Function that the reading thread calls for each message of the round. If it returns False, the
                message is kept for `receive` and `poll`.

        Raises:
            RoundLeft: When the round has ended.
        """
        with self.changed:
            self._round, self._over = round, round <= self._last_left
            self._handle = handle
            kept = [message for message in self._messages if not handle(message)]
            self._messages = collections.deque(kept)
        self.send(hello)

    @property
    def over(self) -> bool:
        """True if the round has ended in this process."""
        return self._over

    def end_round(self) -> None:
        """End the round in this process, after the main thread has left it.

        The thread that reads the channel does not abort process groups after this call.
        """
        with self.changed:
            self._round, self._over = None, True
            self.changed.notify_all()

    def complete_round(self) -> None:
        """End the round because its work is complete. The process continues with other work.

        The thread that reads the channel does not abort process groups after this call.
        """
        with self.changed:
            self._round = None
            self.changed.notify_all()

    def say_left(self, left: Left) -> None:
        """Send `left`, the last message of this process in a round. The round has already ended in this process."""
        self._end.send(left)

    def next_round(self) -> Enter:
        """Wait for the next round. Messages of the previous round that have arrived are dropped."""
        return self._receive(Enter, lambda: None)

    def finish(self) -> None:
        """Wait until the agent has read all messages."""
        self._end.finish()

    # --- the thread

    def _receive(self, kind: type[T], check: Callable[[], None]) -> T:
        with self.changed:
            while True:
                check()
                for message in self._messages:
                    if isinstance(message, kind):
                        self._messages.remove(message)
                        return message
                if self.closed:
                    raise ChannelClosed(CLOSED)
                self.changed.wait()

    def _read(self) -> None:
        try:
            while True:
                message: Message = self._end.receive(object)  # type: ignore[assignment]  # all kinds
                if isinstance(message, Leave):
                    self._leave(message.round)
                    continue
                with self.changed:
                    if isinstance(message, Enter):
                        self._messages.clear()
                    if self._over or not self._handle(message):
                        self._messages.append(message)
                    self.changed.notify_all()
        except (ChannelClosed, ProtocolError):
            with self.changed:
                self.closed = True
                self.changed.notify_all()

    def _leave(self, round: int) -> None:
        """Abort the process groups repeatedly until the main thread has left the round.

        If the main thread is not in this round, abort nothing.
        """
        with self.changed:
            self._last_left = max(self._last_left, round)
            self._over = True
            self.changed.notify_all()
            while self._round == round:
                self._abort()
                self.changed.wait(ABORT_SECONDS)
