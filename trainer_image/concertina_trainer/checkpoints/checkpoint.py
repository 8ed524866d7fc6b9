"""Durable checkpoints: how they are written, and `LATEST` with its fence.

    <uri>/<uid>/round-<r>/step-<s>/shard-<k>-of-<n>.safetensors   a shard: its file in node memory as it is
    <uri>/<uid>/round-<r>/step-<s>/shard-<k>-of-<n>.json          its sidecar: a shard without it is not there
    <uri>/<uid>/round-<r>/step-<s>/manifest.json                  written when every shard is there
    <uri>/<uid>/round-<r>/step-<s>/readers/*                      leases of who reads it (see `retention`)
    <uri>/LATEST                                                  names one manifest; moved by conditional write

The fence: `LATEST` never goes back to a lower round or step of a job, and never from one job to another, except from
exactly the checkpoint that the other job's run was continued from: no two live jobs may share a folder (decision "Whose
LATEST may be replaced"). What a rollback undid is never named again: `LATEST` says itself what that is (`rollback`
writes it), so that no late publication of such a state is taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from concertina_protocol import Durable, SnapshotId, Undone
from concertina_protocol.sidecar import Damaged
from concertina_protocol.typed_json import from_json
from concertina_trainer.checkpoints import retention
from concertina_trainer.checkpoints.manifest import (
    NAME,
    VERSION,
    Code,
    Manifest,
    ShardFile,
    StoredSidecar,
    here,
    part_name,
    running_crc32,
    to_json,
)
from concertina_trainer.format.shardfile import Continued, header_length, parse_header
from concertina_trainer.objects.prefix import Changed, ObjectPrefix, StorageError

if TYPE_CHECKING:
    from obstore import UpdateVersion

LATEST = "LATEST"


class Fenced(Exception):
    """A sentence: somebody else has the right to write here."""


@dataclasses.dataclass(frozen=True)
class Latest:
    durable: Optional[Durable]  # noqa: UP045 (from_json knows typing's form)
    """None: nothing is left that is good."""
    manifest: str
    """Key of the manifest, below the checkpoint URI."""
    crc32: int
    """Of the manifest."""
    undone: tuple[Undone, ...] = ()
    """What rollbacks have made void, by rising rounds; ..."""
    undone_uid: str = ""
    """... of this job."""

    def undid(self, uid: str) -> tuple[Undone, ...]:
        return self.undone if uid == self.undone_uid else ()

    def voids(self, uid: str, round: int, step: int) -> Undone | None:
        """What has undone this state."""
        return next((some for some in self.undid(uid) if some.covers(round, step)), None)


@dataclasses.dataclass(frozen=True)
class Publishing:
    """What a job's checkpoints have in common."""

    uid: str
    job: str
    trainer: Mapping[str, Any]
    code: Code
    keeping: retention.Keeping


def ship(folder: ObjectPrefix, uid: str, id: SnapshotId, shard: int, path: Path) -> None:
    """Put one shard file into storage, to stay. Raises StorageError or Damaged."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        begin = header_length(content[:8])
        header = content[:begin]
        metadata = parse_header(header[8:]).metadata
        if (metadata.id, metadata.shard) != (id, shard):
            raise Damaged(f"{path} holds shard {metadata.shard} of step {metadata.id.step}, not {shard} of {id.step}")
        name, blocks = part_name(id, shard), running_crc32(content)
        shipped = ShardFile(f"{name}.safetensors", len(content), blocks[-1], begin, zlib.crc32(header))
    keys = [f"{here(uid, id)}/{key}" for key in (shipped.key, f"{name}.json")]
    folder.put(keys[0], path)
    folder.put(keys[1], to_json(StoredSidecar(shipped, metadata, blocks)))
    folder.settle(keys)


def publish(folder: ObjectPrefix, run: Publishing, id: SnapshotId, complete: bool) -> Durable:
    """Write the manifest of a wholly shipped snapshot, move LATEST, delete what is not kept. Raises StorageError, or
    Fenced."""
    place, now = here(run.uid, id), time.time()
    durable = Durable(run.uid, id.round, id.step, f"{folder.uri}/{place}", complete, now)
    found = _read_latest(folder)[0]
    _check_round(durable, found)  # first: a later round may have collected the shards
    sidecars = _shipped(folder, place, id)
    metadata = sidecars[0].facts
    _check_fence(durable, metadata.continued, found)
    undone = found.undid(run.uid) if found else ()
    manifest = to_json(
        Manifest(
            version=VERSION,
            uid=run.uid,
            job=run.job,
            id=id,
            position=metadata.position,
            config=metadata.config,
            data=metadata.data,
            complete=complete,
            at=now,
            parts=tuple(each.part for each in sidecars),
            parallelism={"data": id.shards},
            trainer=run.trainer,
            code=run.code,
            continued=metadata.continued,
            skipped=metadata.skipped,
            undone=undone,
        )
    )
    folder.put(f"{place}/{NAME}", manifest)
    folder.settle([f"{place}/{NAME}"])
    try:
        durable = _move_latest(folder, durable, f"{place}/{NAME}", zlib.crc32(manifest), metadata.continued)
    except Fenced:
        with contextlib.suppress(StorageError):  # it will never be named: a leftover without a manifest
            folder.delete([f"{place}/{NAME}"])
        raise
    before = metadata.continued.uid if metadata.continued and metadata.continued.uid != run.uid else ""
    retention.sweep(folder, durable, before, undone, run.keeping)
    return durable


def _shipped(folder: ObjectPrefix, place: str, id: SnapshotId) -> list[StoredSidecar]:
    present = folder.list(place)
    names = [f"{place}/{part_name(id, shard)}" for shard in range(id.shards)]
    missing = next((shard for shard, name in enumerate(names) if f"{name}.json" not in present), None)
    if missing is not None:
        raise StorageError(f"Part {missing} of step {id.step} is not in storage yet.")
    texts = folder.get_many([f"{name}.json" for name in names])
    try:
        sidecars = [from_json(StoredSidecar, json.loads(text or b"null")) for text in texts]
    except (ValueError, AttributeError) as error:
        raise StorageError(f"What lies beside the parts in {folder.uri}/{place} can't be read: {error}.") from error
    for name, each in zip(names, sidecars, strict=True):
        if present.get(f"{name}.safetensors") != each.part.size:
            raise StorageError(f"{folder.uri}/{name}.safetensors is not the {each.part.size} bytes that were written.")
    return sidecars


def _move_latest(folder: ObjectPrefix, durable: Durable, key: str, crc32: int, continued: Continued | None) -> Durable:
    def moved(found: Latest | None) -> Latest | None:
        _check_fence(durable, continued, found)
        if found and found.durable and _place(found.durable) == _place(durable):
            return None  # an earlier try got through
        return Latest(durable, key, crc32, found.undid(durable.uid) if found else (), durable.uid)

    now = change_latest(folder, moved)
    assert now is not None
    assert now.durable is not None
    return now.durable


def change_latest(folder: ObjectPrefix, change: Callable[[Latest | None], Latest | None]) -> Latest | None:
    """By conditional write; None of `change`: it stays as it is. Returns what it is then. Raises StorageError."""
    for _ in range(10):
        found, version = _read_latest(folder)
        if (wanted := change(found)) is None:
            return found
        with contextlib.suppress(Changed):
            folder.put_if(LATEST, to_json(wanted), version)
            return wanted
    raise StorageError(f"{folder.uri}/LATEST changes all the time: is another job writing here?")


def _check_fence(ours: Durable, continued: Continued | None, found: Latest | None) -> None:
    _check_round(ours, found)
    theirs = found.durable if found else None
    if theirs is None or theirs.uid == ours.uid or continued == Continued(theirs.uid, theirs.round, theirs.step):
        return
    raise Fenced(
        f"{LATEST} belongs to another job (uid {theirs.uid}, round {theirs.round}, step {theirs.step}): two jobs "
        "can't share a checkpoint URI. Give this job a URI of its own, or delete the other one."
    )


def _check_round(ours: Durable, found: Latest | None) -> None:
    """Among those of one job. A lower round is refused once a higher one has published, not when it is claimed: that
    would take storage to begin a round (decision "No fence at the start of a round")."""
    if found is None:
        return
    if void := found.voids(ours.uid, ours.round, ours.step):
        raise Fenced(
            f"step {ours.step} of round {ours.round} was undone: training went back to step {void.step}, and goes on "
            "in a later round."
        )
    theirs = found.durable
    if theirs is not None and theirs.uid == ours.uid and _place(theirs) > _place(ours):
        raise Fenced(
            f"{LATEST} is already at round {theirs.round}, step {theirs.step} of this job: round {ours.round}, step "
            f"{ours.step} is of an older world and is not taken."
        )


def _place(durable: Durable) -> tuple[str, int, int]:
    return durable.uid, durable.round, durable.step


def read_latest(folder: ObjectPrefix) -> Durable | None:
    """What `LATEST` names. Raises StorageError."""
    found = read_all_of_latest(folder)
    return found.durable if found else None


def read_all_of_latest(folder: ObjectPrefix) -> Latest | None:
    """With what was undone. Raises StorageError."""
    return _read_latest(folder)[0]


def _read_latest(folder: ObjectPrefix) -> tuple[Latest | None, UpdateVersion | None]:
    found = folder.get_version(LATEST)
    if found is None:
        return None, None
    try:
        return from_json(Latest, json.loads(found[0])), found[1]
    except ValueError as error:
        raise StorageError(
            f"{folder.uri}/LATEST is damaged ({error}): correct it by hand or use another URI."
        ) from error
