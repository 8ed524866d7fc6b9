"""A saved state, wherever it lies: what its shards hold is known before a byte of a tensor is brought here."""

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
    @property
    def id(self) -> SnapshotId: ...

    def header(self, shard: int) -> Header: ...

    def open(self, shard: int) -> ShardReader: ...


class Requests(Protocol):
    """To the agent, which answers."""

    def request(self, message: Message, kind: type[T]) -> T: ...


class LocalShard:
    """A shard file on this machine, in memory as a rule. Raises RestoreFailed."""

    batch_bytes = 16 << 20

    def __init__(self, path: Path, expected: SnapshotId) -> None:
        try:
            self._path, self._file = path, path.open("rb", buffering=0)
            self.header = parse_header(self._file.read(header_length(self._file.read(8)) - 8))
        except (OSError, ValueError) as error:
            raise RestoreFailed(f"the snapshot in {path} can't be used: {error}") from error
        if self.header.metadata.id != expected:
            raise RestoreFailed(f"{path} holds {self.header.metadata.id} where {expected} was expected")

    def read_into(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Cheaper than to copy out of a mapping, whose pages would have to be faulted in; and this needs no GIL."""
        for begin, target in parts:
            while target:
                count = os.preadv(self._file.fileno(), [target], begin)
                if not count:
                    raise RestoreFailed(f"the snapshot in {self._path} ends {len(target)} bytes early")
                target, begin = target[count:], begin + count


class InMemory:
    """What agents hold; ours brings a shard here from another one if need be. Raises RestoreFailed."""

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
    """What a rank is to read of a saved state, and from where."""

    plan: ReadPlan
    shards: Mapping[int, ShardReader]
    """Those of the plan, by number."""
    headers: Mapping[int, Header]

    @property
    def metadata(self) -> ShardMetadata:
        """Of the state: any header has it, and a rank may have nothing to read."""
        return next(iter(self.headers.values())).metadata


def find(saved: SavedState, alone: int | None, plan: Callable[[Mapping[int, Header]], ReadPlan]) -> Found:
    """`alone`: the one shard that this rank needs, where nothing was resized. Else all headers are compared with what
    it wants, and the shards that have some of it are brought here."""
    shards: dict[int, ShardReader] = {}
    if alone is not None:
        shards[alone] = saved.open(alone)
        held = {alone: shards[alone].header}
    else:
        held = {shard: saved.header(shard) for shard in range(saved.id.shards)}
    made = plan(held)
    for shard in made.shards:
        shards[shard] = shards.get(shard) or saved.open(shard)
        if shards[shard].header != held[shard]:
            raise RestoreFailed(f"shard {shard} of step {saved.id.step} is not what its header said: one is damaged.")
    return Found(made, shards, held)
