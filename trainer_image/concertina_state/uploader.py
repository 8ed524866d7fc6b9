"""Uploader: a process that an agent starts to write checkpoints to durable storage. It serves several rounds.

A round is a period in which a fixed set of replicas trains. The uploader writes these objects:

    <uri>/<uid>/round-<r>/step-<s>/shard-<k>-of-<n>.safetensors   a shard, as a copy of its file in node memory
    <uri>/<uid>/round-<r>/step-<s>/shard-<k>-of-<n>.json          the sidecar; a shard without it counts as missing
    <uri>/<uid>/round-<r>/step-<s>/manifest.json                  written when every shard is in storage
    <uri>/<uid>/round-<r>/step-<s>/readers/*                      leases of readers (see `retention`)
    <uri>/LATEST                                                  names one manifest; changed last (see `latest`)
    <uri>/OWNER                                                   the job that may write here (see `owner`)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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

from concertina_protocol import BestCheckpoint, Durable, SnapshotId, Storage, StorageHealth
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
from concertina_state.checkpoints import best as best_checkpoint
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
    EvaluationResult,
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
    """Facts about a run that are written into manifests but are not part of the saved state."""

    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """spec.trainer with its defaults, or {} for a user's own script."""
    reaches: Sequence[int] = ()
    """Numbers of steps by which a rollback may go back (see `retention.Keeping.back`)."""
    trainer_in_shards: bool = False
    """True if `trainer` lacks the model that `trainer.model.from` describes.

    The header of each shard contains this model.
    """


UNKNOWN = UploadedRun()


@dataclasses.dataclass(frozen=True)
class Destination:
    """Fields of spec.checkpoint that the uploader uses."""

    uri: str
    keep: int = 5
    """Number of checkpoints to keep. The default is that of the CRD's schema."""
    keep_every_steps: int | None = None
    keep_best: bool = False
    take_over: str = ""
    """Uid of the job whose folder this job may take over (spec.checkpoint.takeOver), or ""."""

    @staticmethod
    def of(text: str) -> Destination:
        """Parse spec.checkpoint from JSON."""
        fields = json.loads(text)
        return Destination(
            uri=fields["uri"],
            keep=fields.get("keep") or Destination.keep,
            keep_every_steps=fields.get("keepEverySteps"),
            keep_best=bool(fields.get("keepBest")),
            take_over=fields.get("takeOver") or "",
        )


def main(run: UploadedRun = UNKNOWN) -> NoReturn:
    """Answer the agent's requests one by one, until the agent exits."""
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
    """Answer a request of the agent. If the request fails, the answer contains the error as a sentence for users."""
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
        return Shipped(request.id, request.shard, f"{path} is missing: its snapshot was discarded.")
    path.unlink(missing_ok=True)
    return Shipped(request.id, request.shard)


def ship(folder: ObjectPrefix, uid: str, id: SnapshotId, shard: int, path: Path) -> None:
    """Write one shard file to durable storage.

    Raises:
        StorageError: When durable storage can't be written.
        Damaged: When the file is damaged, or contains a different shard.
    """
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
    """Yield the blocks of a file. A block is valid until HELD more blocks have been produced.

    The file is read rather than mapped, because the agent truncates the file of a snapshot that is no longer needed
    (decision "Freed shards are truncated").

    Raises:
        Damaged: When the file was truncated.
    """
    buffers = itertools.cycle([memoryview(bytearray(BLOCK)) for _ in range(HELD + 1)])
    for begin in range(0, size, BLOCK):
        block = next(buffers)[: size - begin]
        if os.preadv(file.fileno(), [block], begin) < len(block):
            raise Damaged(f"{file.name} ends before byte {size}: its snapshot was discarded")
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
    """Publish a checkpoint whose shards are all in storage, so that a job can continue from it.

    This function writes the manifest, makes the object LATEST name the checkpoint, and deletes old checkpoints.

    Raises:
        StorageError: When durable storage fails before LATEST has been changed.
        Fenced: When another job owns the folder, or a later round has published a checkpoint.
    """
    job, code = about_this_process()
    prefix, now = here(uid, id), time.time()
    durable = Durable(uid, id.round, id.step, f"{folder.uri}/{prefix}", complete, now)
    latest = read_all_of_latest(folder)
    check_round(durable, latest)  # checked first, because a later round may have deleted the shards
    sidecars = _shipped(folder, prefix, id)
    metadata = sidecars[0].facts
    replaced = _replaced(folder, durable, metadata.continued, latest)
    undone = latest.undid(uid) if latest else ()
    parent = parent_of(folder, uid, id, metadata.origin, metadata.continued, latest)
    manifest = Manifest(
        version=VERSION,
        uid=uid,
        job=job,
        id=id,
        position=metadata.position,
        config=metadata.config,
        data=metadata.data,
        complete=complete,
        at=now,
        parts=tuple(sidecar.part for sidecar in sidecars),
        parallelism=_parallelism(id.shards),
        trainer=_trainer_of(folder, prefix, sidecars[0]) if run.trainer_in_shards else run.trainer,
        code=code,
        continued=metadata.continued,
        skipped=metadata.skipped,
        undone=undone,
        frozen=metadata.frozen,
        lineage=lineage_of(sidecars, parent, spec_of_this_job()),
        evaluation=EvaluationResult.after(id.step, metadata.evaluations),
    )
    text = to_json(manifest)
    folder.put(f"{prefix}/{NAME}", text)
    folder.settle([f"{prefix}/{NAME}"])
    best_before = latest.durable.best if latest and latest.durable else None
    try:
        durable = move_latest(
            folder, durable, f"{prefix}/{NAME}", zlib.crc32(text), replaced,
            functools.partial(_best, folder, latest, manifest) if destination.keep_best else lambda best: None,
        )  # fmt: skip
    except Fenced:
        with contextlib.suppress(StorageError):  # LATEST will never name this checkpoint, so it should have no manifest
            folder.delete([f"{prefix}/{NAME}"])
        raise
    before = {metadata.continued.uid if metadata.continued else uid, best_before.uid if best_before else uid} - {uid}
    keeping = retention.Keeping(destination.keep, destination.keep_every_steps, tuple(run.reaches))
    try:
        retention.sweep(folder, durable, before, undone, keeping)
    except StorageError as error:  # without permission to delete, all checkpoints remain; the next call tries again
        return Published(id, durable, str(error))
    return Published(id, durable)


def _best(
    folder: ObjectPrefix, latest: Latest | None, manifest: Manifest, best: BestCheckpoint | None
) -> BestCheckpoint | None:
    """Return the best checkpoint of the folder, given the best one before the checkpoint of `manifest`.

    If LATEST named no best checkpoint before, compare the losses in all manifests, because the job may have set
    `checkpoint.keepBest` only now.

    Raises:
        StorageError: When durable storage can't be read.
    """
    measured = best_checkpoint.measured(manifest)
    if best is None and measured is not None:
        return best_checkpoint.best_in(folder, latest.voids if latest else lambda uid, round, step: None)
    return best_checkpoint.better(best, measured)


def _replaced(
    folder: ObjectPrefix, durable: Durable, continued: Continued | None, latest: Latest | None
) -> Continued | None:
    """Return the checkpoint of another job that this job may replace in `LATEST`, or None.

    Usually, this is the checkpoint from which this job continued. If this job has taken over the folder, it can also be
    a newer checkpoint of the earlier owner, published after the take-over by a pod that had lost its connection to the
    cluster.

    Raises:
        Fenced: When `LATEST` names a checkpoint that this job may not replace.
        StorageError: When durable storage can't be read.
    """
    try:
        check_fence(durable, continued, latest)
    except Fenced:
        named_checkpoint = latest.durable if latest else None
        if named_checkpoint is None or named_checkpoint.uid != owner.took_over_from(folder, durable.uid):
            raise
        return Continued(named_checkpoint.uid, named_checkpoint.round, named_checkpoint.step)
    return continued


def _trainer_of(folder: ObjectPrefix, prefix: str, sidecar: StoredSidecar) -> dict[str, Any]:
    """Return the configuration of the bundled trainer, which the header of each shard contains.

    Raises:
        StorageError: When the header can't be read, or is damaged.
    """
    part = sidecar.part
    [header] = folder.get_ranges(f"{prefix}/{part.key}", [(8, part.header_size)])
    try:
        trainer: dict[str, Any] = json.loads(parse_header(bytes(header)).trainer)
    except ValueError as error:
        raise StorageError(f"the header of {prefix}/{part.key} is damaged: {error}") from error
    return trainer


def _shipped(folder: ObjectPrefix, prefix: str, id: SnapshotId) -> list[StoredSidecar]:
    present = folder.list(prefix)
    names = [f"{prefix}/{part_name(id, shard)}" for shard in range(id.shards)]
    missing = next((shard for shard, name in enumerate(names) if f"{name}.json" not in present), None)
    if missing is not None:
        raise StorageError(f"Part {missing} of step {id.step} is not in storage yet.")
    texts = folder.get_many([f"{name}.json" for name in names])
    try:
        sidecars = [parse_json(StoredSidecar, text or b"null") for text in texts]
    except ValueError as error:
        raise StorageError(f"The files beside the parts in {folder.uri}/{prefix} can't be read: {error}.") from error
    for name, sidecar in zip(names, sidecars):
        if present.get(f"{name}.safetensors") != sidecar.part.size:
            raise StorageError(
                f"{folder.uri}/{name}.safetensors is not the {sidecar.part.size} bytes that were written."
            )
    return sidecars


def _parallelism(ranks: int) -> dict[str, int]:
    """Return the degree of each kind of parallelism, keyed by the name of the kind.

    The degree of "data" is the number of parts into which a batch is divided.
    """
    requested = json.loads(os.environ.get("CONCERTINA_PARALLELISM") or "{}")
    counts = {
        kind: requested[kind] for kind in ("shard", "pipeline", "context", "tensor") if (requested.get(kind) or 1) > 1
    }
    group = math.prod(count for kind, count in counts.items() if kind != "shard")
    return {"data": ranks // group, **counts}


if __name__ == "__main__":
    main()
