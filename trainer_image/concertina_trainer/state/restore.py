"""Where a round's state comes from: the seed, node memory (own or a peer's), or durable storage."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from concertina_protocol import Restore, RestoreSource, SnapshotId
from concertina_protocol.worker_channel import Fetch, Fetched, FetchedHeader, FetchHeader, WorkerEnd
from concertina_trainer.checkpoints.retention import lease
from concertina_trainer.checkpoints.rollback import go_back
from concertina_trainer.checkpoints.stored import StoredCheckpoint, resolve
from concertina_trainer.config import CheckpointConfig, ModelConfig, TrainerConfig
from concertina_trainer.errors import BadInput, RestoreFailed
from concertina_trainer.format import hf_config, hf_names
from concertina_trainer.format.shardfile import Continued, Damaged, Facts, Header, header_length, parse_header
from concertina_trainer.objects.folder import Folder
from concertina_trainer.objects.refusals import final
from concertina_trainer.parallel.parallel import World
from concertina_trainer.state.train_state import ShardBytes, TrainState, overlapping
from concertina_trainer.state.weights import SafetensorsFiles, is_checkpoint

STRETCH = 16 << 20
"""Bytes that one thread reads at a time."""
THREADS = 4
"""One alone does not fill a memory bus."""


class LocalShard:
    """A shard file on this machine."""

    def __init__(self, path: Path, expected: SnapshotId) -> None:
        try:
            self._path, self._file = path, path.open("rb", buffering=0)
            self._map = mmap.mmap(self._file.fileno(), os.fstat(self._file.fileno()).st_size, flags=mmap.MAP_PRIVATE)
            begin = header_length(self._map[:8])
            self.header = parse_header(self._map[8:begin], begin)
        except (OSError, ValueError) as error:
            raise RestoreFailed(f"the snapshot in {path} can't be used: {error}") from error
        if self.header.facts.id != expected:
            raise RestoreFailed(f"{path} holds {self.header.facts.id} where {expected} was expected")

    def read(self, ranges: list[tuple[int, int]]) -> list[memoryview]:
        whole = memoryview(self._map)
        return [whole[begin:end] for begin, end in ranges]

    def read_into(self, parts: list[tuple[memoryview, int]]) -> None:
        """Cheaper than to copy out of the mapping, whose pages would have to be faulted in; and `read` needs no GIL."""
        stretches = [
            (target[at : at + STRETCH], begin + at) for target, begin in parts for at in range(0, len(target), STRETCH)
        ]
        with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))), "restore") as pool:
            for _ in pool.map(self._read, stretches):
                pass

    def _read(self, stretch: tuple[memoryview, int]) -> None:
        target, begin = stretch
        while target:
            count = os.preadv(self._file.fileno(), [target], begin)
            if not count:
                raise RestoreFailed(f"the snapshot in {self._path} ends {len(target)} bytes early")
            target, begin = target[count:], begin + count


def restore(
    start: Restore,
    uid: str,
    state: TrainState,
    config: TrainerConfig,
    checkpoint: CheckpointConfig | None,
    data: str,
    world: World,
    channel: WorkerEnd,
) -> Facts:
    """Fill the state; returns what was restored (its id is meaningless for a fresh start)."""
    start = _not_undone(start, uid, world)
    if start.source == "Fresh" and checkpoint is not None and checkpoint.resume_from:
        return _resume(checkpoint.resume_from, state, data, world)
    if start.source == "Fresh":
        uri = checkpoint.init_from if checkpoint is not None else ""
        files = _files(uri, config.model, world) if uri else None
        state.initialise(config)
        if uri:
            _begin_with(uri, files, config.model, state, world)
        return Facts(SnapshotId(0, 0, state.digest, world.size), world.rank, 0, config.digest(), data)
    if start.source == "Memory":
        assert start.id is not None
        shards = _from_memory(start.id, state, world, channel)
        continued = next(iter(shards.values())).header.facts.continued
    else:
        assert start.durable is not None
        durable = start.durable
        shards, stored = _from_storage(durable.uri, state, world)
        continued = stored.manifest.continued
        if start.durable.uid != uid:
            continued = Continued(start.durable.uid, start.durable.round, start.durable.step)
    return _take(shards, continued, state, data, world)


def _not_undone(start: Restore, uid: str, world: World) -> Restore:
    """With the newest checkpoint that was not undone; from the beginning where none is left."""
    durable = start.durable
    if start.source != "Storage" or durable is None or durable.uid != uid or not start.voids(durable):
        return start
    root = durable.uri.rsplit("/", 3)[0]
    found = _same(world, go_back(root, uid, *start.all_undone) if world.rank == 0 else None)
    if found is None and world.rank == 0:
        print(f"no checkpoint that was not undone is left in {root}: training begins anew", flush=True)
    return dataclasses.replace(start, source=RestoreSource.STORAGE if found else RestoreSource.FRESH, durable=found)


def _take(
    shards: dict[int, ShardBytes], continued: Continued | None, state: TrainState, data: str, world: World
) -> Facts:
    facts = next(iter(shards.values())).header.facts
    if facts.data != data:
        raise BadInput(
            f"the saved state of step {facts.id.step} was trained on data with digest {facts.data}, and data.uri now "
            f"holds {data}: positions in one mean nothing in the other. Give data.uri the same data, or start a new "
            "run under another checkpoint.uri."
        )
    state.load(shards, facts.id.step)
    return dataclasses.replace(facts, shard=world.rank, continued=continued)


def _resume(uri: str, state: TrainState, data: str, world: World) -> Facts:
    """Another run's whole state: this one goes on from it."""
    with _reading(uri, world) as folder:
        shards, stored = _from_storage(folder, state, world)
        place = stored.manifest.place
        continued = Continued(place.uid, place.round, place.step)
        return _take(shards, continued, state, data, world)


def _files(uri: str, model: ModelConfig, world: World) -> Collection[ShardBytes] | None:
    """Of weights to begin with that are not a checkpoint of ours, and of this model as far as can be told; before
    anything that takes long."""
    if _same(world, final(lambda: is_checkpoint(uri)) if world.rank == 0 else None):
        return None
    files = final(lambda: SafetensorsFiles(uri))
    unchecked = final(lambda: files.check(model))
    if unchecked and world.rank == 0:
        print(unchecked, flush=True)
    return final(lambda: files.shards)


def _begin_with(
    uri: str, files: Collection[ShardBytes] | None, model: ModelConfig, state: TrainState, world: World
) -> None:
    """Weights alone; everything else stays as at step 0. `files`: where they are not a checkpoint of ours."""
    if files is not None:
        state.load_weights(files, uri)
    else:
        with _reading(uri, world) as folder:
            stored = StoredCheckpoint(folder)
            if said := stored.manifest.trainer.get("model"):
                hf_config.check_fields(hf_names.config_json(_model(said, stored.uri)), stored.uri, model)
            state.load_weights(stored.parts, stored.uri)
    if world.rank == 0:
        print(f"the weights to begin with are those of {uri}", flush=True)


def _model(said: object, whence: str) -> ModelConfig:
    try:
        return ModelConfig.model_validate(said)
    except ValueError as error:
        problem = " ".join(str(error).split())[:300]
        raise BadInput(f"{whence} is of a model that this version does not know ({problem}).") from error


@contextlib.contextmanager
def _reading(uri: str, world: World) -> Iterator[str]:
    """The same checkpoint on all ranks, wherever LATEST moves meanwhile, and kept until all have read it."""
    folder = _same(world, final(lambda: resolve(uri)) if world.rank == 0 else None)
    with lease(Folder(folder)) if world.rank == 0 else contextlib.nullcontext():
        yield folder
        dist.barrier()


def _same(world: World, value: Any) -> Any:
    """Rank 0's, on all ranks."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=world.device)
    return box[0]


def _from_memory(id: SnapshotId, state: TrainState, world: World, channel: WorkerEnd) -> dict[int, ShardBytes]:
    """The shards that overlap this rank's part: its own number alone where nothing was resized."""

    def header(shard: int) -> Header:
        answer = channel.request(FetchHeader(id, shard), FetchedHeader)
        try:
            if not answer.error:
                return parse_header(answer.header)
        except Damaged as error:
            raise RestoreFailed(f"shard {shard} of the snapshot of step {id.step} is damaged: {error}") from error
        raise RestoreFailed(f"shard {shard} of the snapshot of step {id.step}: {answer.error}")

    def fetch(shard: int) -> ShardBytes:
        answer = channel.request(Fetch(id, shard), Fetched)
        if answer.error:
            raise RestoreFailed(f"shard {shard} of the snapshot of step {id.step}: {answer.error}")
        return LocalShard(Path(answer.path), id)

    return {shard: fetch(shard) for shard in _needed(id, state, world, header)}


def _from_storage(uri: str, state: TrainState, world: World) -> tuple[dict[int, ShardBytes], StoredCheckpoint]:
    checkpoint = StoredCheckpoint(uri)
    try:
        needed = _needed(checkpoint.manifest.id, state, world, lambda shard: checkpoint.part(shard).header)
    except Damaged as error:
        raise BadInput(f"the checkpoint {uri} is damaged: {error}") from error
    return {shard: checkpoint.part(shard) for shard in needed}, checkpoint


def _needed(id: SnapshotId, state: TrainState, world: World, header: Callable[[int], Header]) -> list[int]:
    if (id.layout, id.shards) == (state.digest, world.size):
        return [world.rank]
    candidates = ((shard, header(shard)) for shard in range(id.shards))
    found = [shard for shard, head in candidates if any(overlapping(piece.chunk, head) for piece in state.pieces)]
    return found or [0]
