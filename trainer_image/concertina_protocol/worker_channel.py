"""What an agent and the processes that it forks (workers, the uploader) say to each other, and both ends of it.

Standard library only, Python 3.9+. One unix stream socket (CONCERTINA_SOCKET), served by the agent, a connection per
process, one JSON object a line as in `protocol`: {"kind": name in KINDS, "body": fields}.

A worker's life (bundled trainer):

    Hello  ->                                   the first line
           <-  Start                            where the state comes from
    (FetchHeader -> FetchedHeader, Fetch -> Fetched)*      only with Restore.source Memory; one at a time
    (Beat | Progress | Committed | WantDurable)*           every step, as they come
           <-  CopiedUpTo*, SaveNow*, DrainRequest        at any time
    Done -> and exit 0,  or  Fault -> and a non-zero exit (BadInput: 78), each after `finish`

A command of one's own may speak too, through the package `trainingjob`: Hello, Progress and Beat as above, and, to stop
after the same step on all ranks (`stopping`), Attends -> Attended, and AskPassed -> Passed, then StopAt.

The uploader's: `UploaderHello`, then requests from the agent, answered one by one in order: Probe -> StorageState,
Ship -> Shipped, Publish -> Published, Undo -> StorageState.

How a slot that is being shipped is kept from being overwritten: the worker makes a hard link to the committed slot's
file (`WantDurable.path`, beside the slot) before it says WantDurable, and a worker never writes into a file with more
than one name: it puts a new file in the slot's place instead. The agent hands the path to its uploader (Ship), which
removes that name when the part is in storage; the agent removes those that it gives up.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import socket
import threading
import typing
from asyncio import StreamReader, StreamWriter
from typing import Any, Deque, Dict, List, Optional, Type, TypeVar, Union

from concertina_protocol import (
    MAX_LINE,
    Durable,
    History,
    Progress,
    Restore,
    Rollback,
    SnapshotId,
    Storage,
    Undone,
)
from concertina_protocol.lines import JsonLines
from concertina_protocol.typed_json import ProtocolError

BAD_INPUT_EXIT = 78
"""EX_CONFIG: trying again can't help."""
FINISH_SECONDS = 5.0
"""How long a process that has said its last waits for the agent to have read it."""

# --- worker to agent ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hello:
    rank: int
    pid: int


@dataclasses.dataclass(frozen=True)
class Beat:
    """Every step from ranks other than 0 (rank 0's is its Progress)."""

    rank: int
    step: int
    phase: str
    """starting, restoring, training, checkpointing, evaluating."""


@dataclasses.dataclass(frozen=True)
class Committed:
    """The arena at `path` is whole, and `<path>.json` beside it has its id, shard, size and crc32."""

    id: SnapshotId
    shard: int
    path: str


@dataclasses.dataclass(frozen=True)
class WantDurable:
    """From every rank, after the same step: ship this shard. `path` is a name of its own (see above)."""

    id: SnapshotId
    shard: int
    path: str
    complete: bool = False
    """The run's last step."""


@dataclasses.dataclass(frozen=True)
class FetchHeader:
    """Answered with FetchedHeader: the safetensors header of one shard, from wherever it is held."""

    id: SnapshotId
    shard: int


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Answered with Fetched: one whole shard as a local file, pulled from a peer if need be."""

    id: SnapshotId
    shard: int


@dataclasses.dataclass(frozen=True)
class Done:
    outcome: str
    """complete or drained."""
    step: int


@dataclasses.dataclass(frozen=True)
class Fault:
    reason: str
    """BadInput (then exit 78), RestoreFailed, or why the world has to roll back."""
    message: str
    rollback: Optional[Rollback] = None


@dataclasses.dataclass(frozen=True)
class Attends:
    """From a command of one's own, at its first should_checkpoint(). Answer: Attended, AskPassed or StopAt."""

    rank: int


@dataclasses.dataclass(frozen=True)
class Passed:
    """Answer to AskPassed: so many calls of should_checkpoint() are over; the next one waits for StopAt."""

    rank: int
    calls: int


# --- agent to worker ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Start:
    restore: Restore
    world: int
    """Workers in all."""
    uid: str
    durable: Optional[Durable] = None
    """What LATEST names, as this agent knows it: a checkpoint that a failure has kept from being finished is then due
    at once. None: nothing that is known of."""
    history: History = dataclasses.field(default_factory=History)


@dataclasses.dataclass(frozen=True)
class FetchedHeader:
    header: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Fetched:
    path: str = ""
    """Stays as it is until the worker's round has a snapshot that is complete on peers."""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class DrainRequest:
    """To rank 0 only: stop after the same step; `durable`: and want that snapshot durable."""

    durable: bool


@dataclasses.dataclass(frozen=True)
class SaveNow:
    """To rank 0 only: want the snapshot after the next step durable, and go on."""


@dataclasses.dataclass(frozen=True)
class CopiedUpTo:
    """This rank's snapshots up to this step are complete on its peer (sent at once where there is no peer)."""

    step: int


@dataclasses.dataclass(frozen=True)
class Attended:
    """Go on."""


@dataclasses.dataclass(frozen=True)
class AskPassed:
    """How far are you? The world is about to end."""


@dataclasses.dataclass(frozen=True)
class StopAt:
    """should_checkpoint() is to be true at this call, counted from 1, and the one after it ends the process."""

    call: int


# --- agent and uploader ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class UploaderHello:
    pid: int


@dataclasses.dataclass(frozen=True)
class Probe:
    """Look at durable storage: can it be reached, and what does LATEST name? Answer: StorageState."""


@dataclasses.dataclass(frozen=True)
class StorageState:
    storage: Storage


@dataclasses.dataclass(frozen=True)
class Ship:
    """Put one shard into storage (the same again does no harm). Answer: Shipped; `path` is gone when it went well."""

    id: SnapshotId
    shard: int
    path: str


@dataclasses.dataclass(frozen=True)
class Shipped:
    id: SnapshotId
    shard: int
    error: str = ""
    """A sentence; try again later."""


@dataclasses.dataclass(frozen=True)
class Publish:
    """To the lead's uploader, when every part of the snapshot has been shipped: write its manifest, move LATEST,
    delete what is beyond `keep`. Sizes and checksums of the parts are read from storage. Answer: Published."""

    id: SnapshotId
    complete: bool = False


@dataclasses.dataclass(frozen=True)
class Published:
    id: SnapshotId
    durable: Optional[Durable] = None
    """What LATEST names now."""
    error: str = ""
    """A sentence."""
    refused: bool = False
    """The fence: a higher round or another job has written here. Trying again can't help."""


@dataclasses.dataclass(frozen=True)
class Undo:
    """To the lead's uploader: `LATEST` is to name nothing of this job that was undone, and to take nothing of it any
    more (the same again does no harm). Answer: StorageState."""

    undone: Undone


Message = Union[
    Hello, Progress, Beat, Committed, WantDurable, FetchHeader, Fetch, Done, Fault,
    Attends, Passed, Start, FetchedHeader, Fetched, DrainRequest, SaveNow, CopiedUpTo, Attended, AskPassed, StopAt,
    UploaderHello, Probe, StorageState, Ship, Shipped, Publish, Published, Undo,
]  # fmt: skip
KINDS: Dict[str, Type[Any]] = {
    "Hello": Hello, "Progress": Progress, "Beat": Beat, "Committed": Committed, "WantDurable": WantDurable,
    "FetchHeader": FetchHeader, "Fetch": Fetch, "Done": Done, "Fault": Fault, "Attends": Attends,
    "Passed": Passed, "Start": Start, "FetchedHeader": FetchedHeader, "Fetched": Fetched, "DrainRequest": DrainRequest,
    "SaveNow": SaveNow, "CopiedUpTo": CopiedUpTo, "Attended": Attended, "AskPassed": AskPassed, "StopAt": StopAt,
    "UploaderHello": UploaderHello, "Probe": Probe, "StorageState": StorageState, "Ship": Ship, "Shipped": Shipped,
    "Publish": Publish, "Published": Published, "Undo": Undo,
}  # fmt: skip
"""By the names that lines have for them: these stay, whatever a class is called."""
_LINES = JsonLines(KINDS, "the worker channel")
T = TypeVar("T")


class ChannelClosed(ConnectionError):
    """The other end is gone."""


def encode(message: Message) -> bytes:
    """One line, newline included."""
    return _LINES.encode(message)


def decode(line: bytes) -> Message:
    """The message in one line; raises ProtocolError with a sentence."""
    return typing.cast(Message, _LINES.decode(line))


class WorkerEnd:
    """The end that a forked process holds: blocking, no event loop; one thread reads."""

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


class AgentEnd:
    """The end that the agent holds, one per connection, on asyncio. Open the server with `limit=MAX_LINE`."""

    def __init__(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def receive(self) -> Optional[Message]:
        """The next message; None when the process has said its last (the end is closed then, which it may wait for).
        Raises ProtocolError for a line that is not a message."""
        try:
            line = await self._reader.readline()
        except ValueError as error:
            raise ProtocolError(f"a line over the limit of {MAX_LINE} bytes") from error
        except ConnectionError:
            line = b""
        if not line.endswith(b"\n"):
            self.close()
            return None
        return decode(line)

    def send(self, message: Message) -> None:
        """Buffered; what is sent to a process that is gone is dropped (its exit is noticed elsewhere)."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    def close(self) -> None:
        self._writer.close()
