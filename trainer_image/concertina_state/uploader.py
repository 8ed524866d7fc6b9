"""The uploader: a process of the agent that lives across rounds and writes checkpoints to durable storage.

<uri>/<uid>/round-<r>/step-<s>/shard-<k>-of-<n>.safetensors   a shard: its file in node memory as it is
<uri>/<uid>/round-<r>/step-<s>/shard-<k>-of-<n>.json          its sidecar: a shard without it is not there
<uri>/<uid>/round-<r>/step-<s>/manifest.json                  written when every shard is there
<uri>/<uid>/round-<r>/step-<s>/readers/*                      leases of who reads it (see `retention`)
<uri>/LATEST                                                  names one manifest; moved last (see `latest`)
<uri>/OWNER                                                   the job that writes here (see `owner`)
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from concertina_protocol import Durable, SnapshotId, Storage, StorageHealth
from concertina_protocol.codec.typed_json import parse_json
from concertina_protocol.sidecar import Damaged
from concertina_protocol.worker_channel import (
    ChannelClosed,
    Message,
    Probe,
    Publish,
    Published,
    Ship,
    Shipped,
    StorageState,
    Undo,
    UploaderHello,
    WorkerEnd,
)
from concertina_state.checkpoints import owner, retention, rollback
from concertina_state.checkpoints.ancestry import lineage_of, parent_of
from concertina_state.checkpoints.latest import (
    Fenced,
    Latest,
    check_fence,
    check_round,
    move_latest,
    read_all_of_latest,
    read_latest,
)
from concertina_state.checkpoints.manifest import (
    BLOCK,
    NAME,
    VERSION,
    Manifest,
    ShardFile,
    StoredSidecar,
    about_this_process,
    here,
    part_name,
    running_crc32,
    spec_of_this_job,
    to_json,
)
from concertina_state.format.shardfile import Continued, header_length, parse_header
from concertina_state.objects.prefix import HELD, IMPATIENCE, ObjectPrefix, StorageError


@dataclasses.dataclass(frozen=True)
class UploadedRun:
    """What is known of the run beside its state."""

    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """spec.trainer, with its defaults; empty for a script."""
    reaches: Sequence[int] = ()
    """How many steps a rollback may go back: see `Keeping`."""


UNKNOWN = UploadedRun()


@dataclasses.dataclass(frozen=True)
class Destination:
    """Of spec.checkpoint, what matters here."""

    uri: str
    keep: int = 5
    """As in the schema, where nothing is said."""
    keep_every_steps: int | None = None
    take_over: str = ""
    """Uid of the owner whose folder this job takes over."""

    @staticmethod
    def of(text: str) -> Destination:
        """From spec.checkpoint as JSON."""
        fields = json.loads(text)
        return Destination(
            uri=fields["uri"],
            keep=fields.get("keep") or Destination.keep,
            keep_every_steps=fields.get("keepEverySteps"),
            take_over=fields.get("takeOver") or "",
        )


def main(run: UploadedRun = UNKNOWN) -> NoReturn:
    """Answers the agent's requests one by one until the agent is gone."""
    channel = WorkerEnd(os.environ["CONCERTINA_SOCKET"])
    channel.send(UploaderHello(os.getpid()))
    destination = Destination.of(os.environ["CONCERTINA_CHECKPOINT"])
    uid = os.environ["CONCERTINA_UID"]
    try:
        while True:
            channel.send(answer(channel.receive(object), destination, uid, run))
    except ChannelClosed:
        os._exit(0)


def answer(request: object, destination: Destination, uid: str, run: UploadedRun = UNKNOWN) -> Message:
    """Every error is in the answer, as a sentence."""
    if isinstance(request, Ship):
        return _ship(request, destination, uid)
    if isinstance(request, Publish):
        return _publish(request, destination, uid, run)
    if isinstance(request, Probe):
        return _probe(request, destination, uid)
    assert isinstance(request, Undo), request
    try:
        latest = rollback.undo(ObjectPrefix(destination.uri, IMPATIENCE, create=True), uid, request.undone)
    except StorageError as error:
        return StorageState(Storage(StorageHealth.ERROR, None, str(error)))
    return StorageState(Storage(StorageHealth.READY, latest))


def _probe(request: Probe, destination: Destination, uid: str) -> StorageState:
    job, owned = owner.this_job(uid), request.owned
    try:
        folder = ObjectPrefix(destination.uri, IMPATIENCE, create=True)
        latest = read_latest(folder)
        if not owned and request.living is not None:
            owner.claim(folder, job, request.living, destination.take_over, latest)
            owned = True
        elif not owned:
            owned = owner.look(folder, job, destination.take_over)
    except StorageError as error:
        return StorageState(Storage(StorageHealth.ERROR, None, str(error)), owned)
    return StorageState(Storage(StorageHealth.READY, latest), owned)


def _ship(request: Ship, destination: Destination, uid: str) -> Shipped:
    path = Path(request.path)
    try:
        ship(ObjectPrefix(destination.uri, create=True), uid, request.id, request.shard, path)
    except (StorageError, Damaged) as error:
        return Shipped(request.id, request.shard, str(error))
    except FileNotFoundError:
        return Shipped(request.id, request.shard, f"{path} is gone: its snapshot was given up.")
    path.unlink(missing_ok=True)
    return Shipped(request.id, request.shard)


def ship(folder: ObjectPrefix, uid: str, id: SnapshotId, shard: int, path: Path) -> None:
    """Put one shard file into storage, to stay. Raises StorageError or Damaged."""
    name, ends = part_name(id, shard), list[int]()
    keys = [f"{here(uid, id)}/{name}{ending}" for ending in (".safetensors", ".json")]
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        begin = header_length(file.read(8))
        header = os.pread(file.fileno(), begin, 0)
        metadata = parse_header(header[8:]).metadata
        if (metadata.id, metadata.shard) != (id, shard):
            raise Damaged(f"{path} holds shard {metadata.shard} of step {metadata.id.step}, not {shard} of {id.step}")
        folder.forget(f"{uid}/*/*/{name}.safetensors")
        folder.put_pieces(keys[0], running_crc32(_blocks(file, size), ends), size)
    shipped = ShardFile(f"{name}.safetensors", size, ends[-1], begin, zlib.crc32(header))
    folder.put(keys[1], to_json(StoredSidecar(shipped, metadata, tuple(ends))))
    folder.settle(keys)


def _blocks(file: io.FileIO, size: int) -> Iterator[memoryview]:
    """Each good until there are HELD more. Read, not mapped: what is given up is emptied (decision "What is freed is
    emptied"). Raises Damaged then."""
    buffers = itertools.cycle([memoryview(bytearray(BLOCK)) for _ in range(HELD + 1)])
    for begin in range(0, size, BLOCK):
        block = next(buffers)[: size - begin]
        if os.preadv(file.fileno(), [block], begin) < len(block):
            raise Damaged(f"{file.name} ends before byte {size}: its snapshot was given up")
        yield block


def _publish(request: Publish, destination: Destination, uid: str, run: UploadedRun = UNKNOWN) -> Published:
    folder = ObjectPrefix(destination.uri, create=True)
    try:
        return publish(folder, destination, uid, request.id, request.complete, run)
    except Fenced as error:
        return Published(request.id, None, str(error), refused=True)
    except StorageError as error:
        return Published(request.id, None, str(error))


def publish(
    folder: ObjectPrefix, destination: Destination, uid: str, id: SnapshotId, complete: bool, run: UploadedRun = UNKNOWN
) -> Published:
    """Write the manifest of a wholly shipped snapshot, move LATEST, delete what is not kept. Raises StorageError, or
    Fenced, as long as LATEST has not moved."""
    job, code = about_this_process()
    place, now = here(uid, id), time.time()
    durable = Durable(uid, id.round, id.step, f"{folder.uri}/{place}", complete, now)
    found = read_all_of_latest(folder)
    check_round(durable, found)  # first: a later round may have collected the shards
    sidecars = _shipped(folder, place, id)
    metadata = sidecars[0].facts
    replaced = _replaced(folder, durable, metadata.continued, found)
    undone = found.undid(uid) if found else ()
    parent = parent_of(folder, uid, id, metadata.origin, metadata.continued, found)
    manifest = to_json(
        Manifest(
            version=VERSION,
            uid=uid,
            job=job,
            id=id,
            position=metadata.position,
            config=metadata.config,
            data=metadata.data,
            complete=complete,
            at=now,
            parts=tuple(each.part for each in sidecars),
            parallelism=_parallelism(id.shards),
            trainer=run.trainer,
            code=code,
            continued=metadata.continued,
            skipped=metadata.skipped,
            undone=undone,
            lineage=lineage_of(sidecars, parent, spec_of_this_job()),
        )
    )
    folder.put(f"{place}/{NAME}", manifest)
    folder.settle([f"{place}/{NAME}"])
    try:
        durable = move_latest(folder, durable, f"{place}/{NAME}", zlib.crc32(manifest), replaced)
    except Fenced:
        with contextlib.suppress(StorageError):  # it will never be named: a leftover without a manifest
            folder.delete([f"{place}/{NAME}"])
        raise
    before = metadata.continued.uid if metadata.continued and metadata.continued.uid != uid else ""
    keeping = retention.Keeping(destination.keep, destination.keep_every_steps, tuple(run.reaches))
    try:
        retention.sweep(folder, durable, before, undone, keeping)
    except StorageError as error:  # who may not delete keeps all of them; the next one asks again
        return Published(id, durable, str(error))
    return Published(id, durable)


def _replaced(
    folder: ObjectPrefix, durable: Durable, continued: Continued | None, found: Latest | None
) -> Continued | None:
    """The checkpoint of another job that `LATEST` may name: the one that this run goes on from, or whatever the owner
    before this job has published since: a pod of it that was cut off, say. Raises Fenced, or StorageError."""
    try:
        check_fence(durable, continued, found)
    except Fenced:
        theirs = found.durable if found else None
        if theirs is None or theirs.uid != owner.took_over_from(folder, durable.uid):
            raise
        return Continued(theirs.uid, theirs.round, theirs.step)
    return continued


def _shipped(folder: ObjectPrefix, place: str, id: SnapshotId) -> list[StoredSidecar]:
    present = folder.list(place)
    names = [f"{place}/{part_name(id, shard)}" for shard in range(id.shards)]
    missing = next((shard for shard, name in enumerate(names) if f"{name}.json" not in present), None)
    if missing is not None:
        raise StorageError(f"Part {missing} of step {id.step} is not in storage yet.")
    texts = folder.get_many([f"{name}.json" for name in names])
    try:
        sidecars = [parse_json(StoredSidecar, text or b"null") for text in texts]
    except ValueError as error:
        raise StorageError(f"The files beside the parts in {folder.uri}/{place} can't be read: {error}.") from error
    for name, each in zip(names, sidecars, strict=True):
        if present.get(f"{name}.safetensors") != each.part.size:
            raise StorageError(f"{folder.uri}/{name}.safetensors is not the {each.part.size} bytes that were written.")
    return sidecars


def _parallelism(ranks: int) -> dict[str, int]:
    """How many ranks each dimension had; "data": how many shares a batch was cut into."""
    asked = json.loads(os.environ.get("CONCERTINA_PARALLELISM") or "{}")
    found = {kind: asked[kind] for kind in ("shard", "pipeline", "context", "tensor") if (asked.get(kind) or 1) > 1}
    group = math.prod(count for kind, count in found.items() if kind != "shard")
    return {"data": ranks // group, **found}


if __name__ == "__main__":
    main()
