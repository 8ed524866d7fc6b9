"""Reading of a saved state in memory or in storage. All headers are read before any tensor bytes are fetched."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from concertina_protocol import SnapshotId
from concertina_protocol.sidecar import Damaged
from concertina_protocol.worker_channel import Fetch, Fetched, FetchedHeader, FetchHeader, Message
from concertina_state.errors import RestoreFailed
from concertina_state.filling import ShardReader
from concertina_state.format.read_plan import ReadPlan
from concertina_state.format.shardfile import Header, ShardMetadata, header_length, parse_header

T = TypeVar("T")


class SavedState(Protocol):
    """Saved state, which gives access to the headers and files of its shards."""

    @property
    def id(self) -> SnapshotId: ...

    def header(self, shard: int) -> Header: ...

    def open(self, shard: int) -> ShardReader: ...


class Requests(Protocol):
    """Connection by which the agent answers a worker's requests for shards."""

    def request(self, message: Message, kind: type[T]) -> T: ...


class LocalShard:
    """Shard file on this machine, usually in node memory. Methods raise RestoreFailed if the file can't be read."""

    batch_bytes = 16 << 20

    def __init__(self, path: Path, expected: SnapshotId) -> None:
        """Open the file and read its header.

        Raises:
            RestoreFailed: When the file can't be read, or contains a snapshot other than `expected`.
        """
        try:
            self._path, self._file = path, path.open("rb", buffering=0)
            self.header = parse_header(self._file.read(header_length(self._file.read(8)) - 8))
        except (OSError, ValueError) as error:
            raise RestoreFailed(f"the snapshot in {path} can't be used: {error}") from error
        if self.header.metadata.id != expected:
            raise RestoreFailed(f"{path} holds {self.header.metadata.id} , but {expected} was expected")

    def read_into(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each memoryview with bytes of the file, beginning at the memoryview's offset.

        The file is read and not memory-mapped, because mapping takes longer and holds the GIL.

        Raises:
            RestoreFailed: When the file ends early.
        """
        for begin, target in parts:
            while target:
                count = os.preadv(self._file.fileno(), [target], begin)
                if not count:
                    raise RestoreFailed(f"the snapshot in {self._path} ends {len(target)} bytes early")
                target, begin = target[count:], begin + count


class InMemory:
    """Snapshot in the memory of agents.

    This pod's agent provides a shard, after fetching the shard from another agent if necessary.

    Methods raise RestoreFailed.
    """

    def __init__(self, id: SnapshotId, channel: Requests) -> None:
        self.id, self._channel = id, channel

    def header(self, shard: int) -> Header:
        answer = self._channel.request(FetchHeader(self.id, shard), FetchedHeader)
        try:
            if not answer.error:
                return parse_header(answer.header.encode())
        except Damaged as error:
            raise RestoreFailed(f"shard {shard} of the snapshot of step {self.id.step} is damaged: {error}") from error
        raise RestoreFailed(f"shard {shard} of the snapshot of step {self.id.step}: {answer.error}")

    def open(self, shard: int) -> LocalShard:
        answer = self._channel.request(Fetch(self.id, shard), Fetched)
        if answer.error:
            raise RestoreFailed(f"shard {shard} of the snapshot of step {self.id.step}: {answer.error}")
        return LocalShard(Path(answer.path), self.id)


@dataclasses.dataclass(frozen=True)
class Found:
    """Result of `find`: the plan of a rank's reads from a saved state, and the opened shards."""

    plan: ReadPlan
    shards: Mapping[int, ShardReader]
    """Readers of the shards that the plan uses, keyed by the shard's number."""
    headers: Mapping[int, Header]

    @property
    def metadata(self) -> ShardMetadata:
        """Metadata of the saved state, which every shard's header contains."""
        return next(iter(self.headers.values())).metadata


def find(saved: SavedState, alone: int | None, plan: Callable[[Mapping[int, Header]], ReadPlan]) -> Found:
    """Plan what this rank reads from a saved state, and open the shards that contain it.

    Args:
        saved: The saved state.
        alone: Number of the only shard that this rank needs, or None if the rank may need any shard. If None, `plan`
            receives the headers of all shards.
        plan: Function that plans the reads, given the shards' headers, keyed by the shard's number.

    Raises:
        RestoreFailed: When a shard can't be read, or its header has changed.
    """
    shards: dict[int, ShardReader] = {}
    if alone is not None:
        shards[alone] = saved.open(alone)
        headers = {alone: shards[alone].header}
    else:
        headers = {shard: saved.header(shard) for shard in range(saved.id.shards)}
    read_plan = plan(headers)
    for shard in read_plan.shards:
        shards[shard] = shards.get(shard) or saved.open(shard)
        if shards[shard].header != headers[shard]:
            raise RestoreFailed(
                f"shard {shard} of step {saved.id.step} differs from its header: the shard or the header is damaged."
            )
    return Found(read_plan, shards, headers)
