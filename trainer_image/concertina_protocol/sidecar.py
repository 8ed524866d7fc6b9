"""Sidecar of a shard file, `<file>.json`: a shard file counts as present only while its sidecar exists.

Workers write shard files in place, and agents copy them. Both remove the sidecar before they change the first byte and
write it again after the last one. The module uses the standard library only and supports Python 3.9 and later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Optional

from concertina_protocol.codec.typed_json import parse_json
from concertina_protocol.messages.records import SnapshotId

SNAPSHOT_SLOTS = 3
"""Number of files that a worker writes its snapshots into in turn.

The files hold the newest snapshot that is complete on all peers, the newest snapshot, and the snapshot that is being
written.
"""
COPY_SLOTS = 2
"""Number of files that an agent copies a peer's shard into: the newest copy, and the one that is being written."""


class Damaged(ValueError):
    """Error for a shard file whose bytes do not match its sidecar or header; its text is a sentence."""


@dataclasses.dataclass(frozen=True)
class Sidecar:
    """Description of a shard file."""

    id: SnapshotId
    shard: int
    size: int
    """Size of the file in bytes."""
    crc32: int
    """crc32 of the whole file."""
    committed: bool = True


def sidecar_path(file: Path) -> Path:
    """Return the path of a shard file's sidecar."""
    return file.with_suffix(".json")


def write_sidecar(file: Path, sidecar: Sidecar) -> None:
    """Write a sidecar atomically; the shard file counts as present from then on."""
    draft = file.with_suffix(".json.new")
    draft.write_text(json.dumps(dataclasses.asdict(sidecar)))
    draft.replace(sidecar_path(file))


def remove_sidecar(file: Path) -> None:
    """Remove a sidecar if it exists; the shard file does not count as present from then on."""
    sidecar_path(file).unlink(missing_ok=True)


def read_sidecar(file: Path) -> Optional[Sidecar]:
    """Return the sidecar of a shard file.

    Return None if there is no committed sidecar, or if the file does not have the size that it says.
    """
    with contextlib.suppress(OSError, ValueError):
        sidecar = parse_json(Sidecar, sidecar_path(file).read_bytes())
        if sidecar.committed and file.stat().st_size == sidecar.size:
            return sidecar
    return None
