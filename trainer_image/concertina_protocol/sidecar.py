"""Sidecar of a shard file, `<file>.json`. A shard file counts as present only if its sidecar exists.

Workers write shard files in place, and agents write copies of them. Both remove the sidecar before they change the
first byte of a file, and write the sidecar after the last byte. The module uses the standard library only and supports
Python 3.9 and later.
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
"""Number of files (slots) into which a worker writes its snapshots in turn.

One slot contains the newest snapshot whose shards are all copied to another replica, one contains the newest snapshot,
and one is being written.
"""
COPY_SLOTS = 2
"""Number of files (slots) into which an agent copies a peer's shard in turn.

One slot contains the newest copy, and the other one is being written.
"""


class Damaged(ValueError):
    """Error that the bytes of a shard file do not match its sidecar or header. The text is a sentence."""


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
    """Write a sidecar atomically. From then on, the shard file counts as present."""
    draft = file.with_suffix(".json.new")
    draft.write_text(json.dumps(dataclasses.asdict(sidecar)))
    draft.replace(sidecar_path(file))


def remove_sidecar(file: Path) -> None:
    """Remove a sidecar if it exists. From then on, the shard file does not count as present."""
    sidecar_path(file).unlink(missing_ok=True)


def read_sidecar(file: Path) -> Optional[Sidecar]:
    """Return the sidecar of a shard file, or None if the shard file does not count as present.

    A shard file counts as present if it has a committed sidecar and the size that the sidecar states.
    """
    with contextlib.suppress(OSError, ValueError):
        sidecar = parse_json(Sidecar, sidecar_path(file).read_bytes())
        if sidecar.committed and file.stat().st_size == sidecar.size:
            return sidecar
    return None
