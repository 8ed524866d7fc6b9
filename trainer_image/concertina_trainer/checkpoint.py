"""Durable checkpoints: parts, sidecars, manifest, and `LATEST` with its fence.

    <uri>/<uid>/round-<r>/step-<s>/shard-<k>-of-<n>.safetensors   a part: a committed arena as it is
    <uri>/<uid>/round-<r>/step-<s>/shard-<k>-of-<n>.json          its size and crc32: a part without it is not there
    <uri>/<uid>/round-<r>/step-<s>/manifest.json                  written when every part is there
    <uri>/LATEST                                                  names one manifest; moved by conditional write

The fence: `LATEST` never goes back to a lower round or step of a job, and never from one job to another, except from
exactly the checkpoint that the other job's run was continued from.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import time
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from concertina_agent.protocol import Durable, SnapshotId
from concertina_agent.typed_json import from_json
from concertina_trainer.errors import BadInput
from concertina_trainer.shardfile import Continued, Damaged, Facts, Header, header_length, parse_header
from concertina_trainer.storage import Changed, Folder, StorageError

LATEST = "LATEST"
HEADER_GUESS = 1 << 18
"""Bytes asked for at first; most headers are shorter."""


class Fenced(Exception):
    """A sentence: somebody else has the right to write here."""


@dataclasses.dataclass(frozen=True)
class Part:
    key: str
    """Within the checkpoint's folder."""
    size: int
    crc32: int
    facts: Facts


@dataclasses.dataclass(frozen=True)
class Manifest:
    uid: str
    id: SnapshotId
    position: int
    config: str
    data: str
    complete: bool
    at: float
    parts: tuple[Part, ...]
    continued: Optional[Continued] = None  # noqa: UP045 (from_json knows typing's form)


@dataclasses.dataclass(frozen=True)
class Latest:
    durable: Durable
    manifest: str
    """Key of the manifest, below the checkpoint URI."""
    crc32: int
    """Of the manifest."""


def folder_of(uid: str, id: SnapshotId) -> str:
    return f"{uid}/round-{id.round}/step-{id.step}"


def part_name(id: SnapshotId, shard: int) -> str:
    return f"shard-{shard}-of-{id.shards}"


# --- writing --------------------------------------------------------------------------------------------------------


def ship(folder: Folder, uid: str, id: SnapshotId, shard: int, path: Path) -> None:
    """Put one shard file into storage. Raises StorageError or Damaged."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        begin = header_length(content[:8])
        facts = parse_header(content[8:begin]).facts
        if (facts.id, facts.shard) != (id, shard):
            raise Damaged(f"{path} holds shard {facts.shard} of step {facts.id.step}, not {shard} of {id.step}")
        key = f"{folder_of(uid, id)}/{part_name(id, shard)}"
        part = Part(f"{part_name(id, shard)}.safetensors", len(content), zlib.crc32(content), facts)
    folder.put(f"{key}.safetensors", path)
    folder.put(f"{key}.json", _json(part))


def publish(folder: Folder, uid: str, id: SnapshotId, complete: bool, keep: int) -> Durable:
    """Write the manifest of a wholly shipped snapshot, move LATEST, delete what is beyond `keep`. Raises StorageError,
    or Fenced."""
    here = folder_of(uid, id)
    parts = _shipped_parts(folder, here, id)
    facts = parts[0].facts
    now = time.time()
    manifest = _json(Manifest(uid, id, facts.position, facts.config, facts.data, complete, now, parts, facts.continued))
    durable = Durable(uid, id.round, id.step, f"{folder.uri}/{here}", complete, now)
    _check_fence(durable, facts.continued, _read_latest(folder)[0])
    folder.put(f"{here}/manifest.json", manifest)
    durable = _move_latest(folder, Latest(durable, f"{here}/manifest.json", zlib.crc32(manifest)), facts.continued)
    prune(folder, uid, durable, keep)
    return durable


def _shipped_parts(folder: Folder, here: str, id: SnapshotId) -> tuple[Part, ...]:
    present = folder.list(here)
    parts = []
    for shard in range(id.shards):
        name = f"{here}/{part_name(id, shard)}"
        sidecar = folder.get(f"{name}.json") if f"{name}.json" in present else None
        if sidecar is None:
            raise StorageError(f"Part {shard} of step {id.step} is not in storage yet.")
        part = from_json(Part, json.loads(sidecar))
        if present.get(f"{name}.safetensors") != part.size:
            raise StorageError(f"{folder.uri}/{name}.safetensors is not the {part.size} bytes that were written.")
        parts.append(part)
    return tuple(parts)


def _move_latest(folder: Folder, latest: Latest, continued: Continued | None) -> Durable:
    for _ in range(10):
        found, version = _read_latest(folder)
        _check_fence(latest.durable, continued, found)
        if found and _place(found.durable) == _place(latest.durable):
            return found.durable  # an earlier try got through
        try:
            folder.put_if(LATEST, _json(latest), version)
        except Changed:
            continue
        return latest.durable
    raise StorageError(f"{folder.uri}/LATEST changes all the time: is another job writing here?")


def _check_fence(ours: Durable, continued: Continued | None, found: Latest | None) -> None:
    if found is None:
        return
    theirs = found.durable
    if theirs.uid != ours.uid:
        if continued == Continued(theirs.uid, theirs.round, theirs.step):
            return
        raise Fenced(
            f"{LATEST} belongs to another job (uid {theirs.uid}, round {theirs.round}, step {theirs.step}): two jobs "
            "can't share a checkpoint URI. Give this job a URI of its own, or delete the other one."
        )
    if _place(theirs) > _place(ours):
        raise Fenced(
            f"{LATEST} is already at round {theirs.round}, step {theirs.step} of this job: round {ours.round}, step "
            f"{ours.step} is of an older world and is not taken."
        )


def _place(durable: Durable) -> tuple[str, int, int]:
    return durable.uid, durable.round, durable.step


def prune(folder: Folder, uid: str, latest: Durable, keep: int) -> None:
    """Delete this job's checkpoints beyond the newest `keep`, and the parts of unfinished ones that are older than
    those. A manifest goes before its parts, so that no manifest ever names a part that is gone."""
    keys = folder.list(uid)
    places = {key: place for key in keys if (place := _place_of(key, uid))}
    finished = sorted({place for key, place in places.items() if key.endswith("/manifest.json")})
    kept = {*finished[-keep:], (latest.round, latest.step)}
    gone = [key for key, place in places.items() if place not in kept and place < min(kept)]
    folder.delete(sorted(gone, key=lambda key: not key.endswith("/manifest.json")))


def _place_of(key: str, uid: str) -> tuple[int, int] | None:
    try:
        owner, round_part, step_part, _ = key.rsplit("/", 3)
        place = int(round_part.removeprefix("round-")), int(step_part.removeprefix("step-"))
    except ValueError:
        return None
    return place if owner == uid else None


# --- reading --------------------------------------------------------------------------------------------------------


def read_latest(folder: Folder) -> Durable | None:
    """What `LATEST` names. Raises StorageError."""
    found = _read_latest(folder)[0]
    return found.durable if found else None


def _read_latest(folder: Folder) -> tuple[Latest | None, str | None]:
    found = folder.get_version(LATEST)
    if found is None:
        return None, None
    try:
        return from_json(Latest, json.loads(found[0])), found[1]
    except ValueError as error:
        raise StorageError(
            f"{folder.uri}/LATEST is damaged ({error}): correct it by hand or use another URI."
        ) from error


class StoredPart:
    """One part, read by byte ranges; as a whole, and then checked, where more than half of it is wanted."""

    def __init__(self, folder: Folder, part: Part) -> None:
        self._folder, self._part = folder, part

    @cached_property
    def header(self) -> Header:
        end = min(HEADER_GUESS, self._part.size)
        start = self._folder.get_ranges(self._part.key, [(0, end)])[0]
        begin = header_length(bytes(start[:8]))
        if begin > end:
            start = self._folder.get_ranges(self._part.key, [(0, begin)])[0]
        return parse_header(bytes(start[8:begin]), begin)

    def read(self, ranges: list[tuple[int, int]]) -> list[memoryview]:
        if 2 * sum(end - begin for begin, end in ranges) < self._part.size:
            return self._folder.get_ranges(self._part.key, ranges)
        whole = self._folder.get_ranges(self._part.key, [(0, self._part.size)])[0]
        if zlib.crc32(whole) != self._part.crc32:
            raise BadInput(
                f"{self._folder.uri}/{self._part.key} is damaged: its crc32 is {zlib.crc32(whole):08x} and the "
                f"manifest says {self._part.crc32:08x}. Point {LATEST} at an older one, or start from another URI."
            )
        return [whole[begin:end] for begin, end in ranges]


class StoredCheckpoint:
    """One finished checkpoint, by its own folder's URI. Raises StorageError or BadInput."""

    def __init__(self, uri: str) -> None:
        self._folder = Folder(uri)
        text = self._folder.get("manifest.json")
        if text is None:
            raise StorageError(f"{uri} has no manifest.json: it was never finished, or has been deleted.")
        try:
            self.manifest = from_json(Manifest, json.loads(text))
        except ValueError as error:
            raise BadInput(f"{uri}/manifest.json is damaged ({error}): use an older checkpoint.") from error

    def part(self, shard: int) -> StoredPart:
        return StoredPart(self._folder, self.manifest.parts[shard])


def _json(value: Any) -> bytes:
    return json.dumps(dataclasses.asdict(value)).encode()
