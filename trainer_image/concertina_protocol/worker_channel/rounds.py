"""Rounds of one worker process: the channel on which the bundled trainer or a script enters and leaves them.

Leave can arrive while the main thread waits in a collective for a rank that is gone. So a thread of the channel reads,
and aborts the groups, whose collectives then raise. From then on nothing of the round leaves the process: each use of
the channel raises RoundLeft, in any thread.
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
"""Seconds between two aborts, because the main thread may be about to make another group."""
CLOSED = "the agent closed its end"
T = TypeVar("T")


def _keep(message: Message) -> bool:
    return False


class RoundLeft(BaseException):
    """The agent has ended the round. This is no Exception, so that no handler of errors on the way takes it for one."""


class RoundChannel:
    """Channel to the agent, for one round after the other."""

    def __init__(self, end: WorkerEnd, abort: Callable[[], None]) -> None:
        """Begin to read. `abort` aborts all groups of the process, from another thread."""
        self._end, self._abort = end, abort
        self.changed = threading.Condition()
        """Lock of all facts here, and of those that `handle` changes."""
        self._messages: collections.deque[Message] = collections.deque()
        self._handle: Callable[[Message], bool] = _keep
        self._round: int | None = None
        """Round that the main thread is in."""
        self._over = False
        """Whether the round has ended, so that nothing of it may be said any more."""
        self._last_left = -1
        """Highest round that the agent has ended."""
        self.closed = False
        """Whether the agent is gone."""
        threading.Thread(target=self._read, name="channel", daemon=True).start()

    # --- within a round

    def check(self) -> None:
        """Check that the round goes on.

        Raises:
            RoundLeft: When it does not.
        """
        if self._over:
            raise RoundLeft

    def send(self, message: Message) -> None:
        """Send a message of the round from any thread."""
        self.check()
        self._end.send(message)

    def poll(self) -> list[Message]:
        """Return the messages that have arrived, without waiting.

        Raises:
            ChannelClosed: If the agent is gone.
        """
        self.check()
        with self.changed:
            if self.closed:
                raise ChannelClosed(CLOSED)
            messages = list(self._messages)
            self._messages.clear()
        return messages

    def receive(self, kind: type[T]) -> T:
        """Wait for the next message of this kind; keep others that arrive before it for `poll`."""
        return self._receive(kind, self.check)

    def request(self, message: Message, kind: type[T]) -> T:
        """Send a message and wait for the answer."""
        self.send(message)
        return self.receive(kind)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition on handled messages holds, or the agent is gone.

        Raises:
            RoundLeft: When the round ends before.
        """
        with self.changed:
            while not holds() and not self.closed:
                self.check()
                self.changed.wait()

    # --- between rounds

    def enter(self, round: int, hello: Hello, handle: Callable[[Message], bool] = _keep) -> None:
        """Enter a round, which the agent may have ended already.

        Args:
            round: Number of the round.
            hello: First message to the agent.
            handle: Handles a message of the round in the thread that reads. The result False keeps the message for
                `receive` and `poll`.

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
        """Whether the round has ended."""
        return self._over

    def end_round(self) -> None:
        """End the round in this process, whose main thread has left it. No abort happens after this."""
        with self.changed:
            self._round, self._over = None, True
            self.changed.notify_all()

    def complete_round(self) -> None:
        """End the round's work in this process, which goes on. No abort happens after this."""
        with self.changed:
            self._round = None
            self.changed.notify_all()

    def say_left(self, left: Left) -> None:
        """Say the last thing of a round that has ended here."""
        self._end.send(left)

    def next_round(self) -> Enter:
        """Wait for the next round. What arrived for the old one is dropped."""
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
        """Abort until the main thread has left the round, unless it has left it by itself or has not entered it."""
        with self.changed:
            self._last_left = max(self._last_left, round)
            self._over = True
            self.changed.notify_all()
            while self._round == round:
                self._abort()
                self.changed.wait(ABORT_SECONDS)
