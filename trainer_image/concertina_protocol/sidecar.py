"""The sidecar of a shard file, `<file>.json`: a file is there once it has one, and as long as it has one.

Workers write shard files in place, agents copy them; each takes the sidecar away before the first byte is changed, and
puts it back when the last one stands. Standard library only, Python 3.9+.
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
"""Files that a worker writes its snapshots into in turn: the newest that is complete on all peers, the newest, and the
one that is being written."""
COPY_SLOTS = 2
"""Files that an agent copies a peer's shard into: the newest, and the one that is being written."""


class Damaged(ValueError):
    """Bytes of a shard file that are not what its sidecar or header says; a sentence."""


@dataclasses.dataclass(frozen=True)
class Sidecar:
    id: SnapshotId
    shard: int
    size: int
    """Bytes of the file."""
    crc32: int
    """Of the whole file."""
    committed: bool = True


def sidecar_path(file: Path) -> Path:
    return file.with_suffix(".json")


def write_sidecar(file: Path, sidecar: Sidecar) -> None:
    """The file is there from now on; never half of it."""
    draft = file.with_suffix(".json.new")
    draft.write_text(json.dumps(dataclasses.asdict(sidecar)))
    draft.replace(sidecar_path(file))


def remove_sidecar(file: Path) -> None:
    """The file, if it was there, is not there from now on."""
    sidecar_path(file).unlink(missing_ok=True)


def read_sidecar(file: Path) -> Optional[Sidecar]:
    """None where the file is not there, or is not as long as is said beside it."""
    with contextlib.suppress(OSError, ValueError):
        sidecar = parse_json(Sidecar, sidecar_path(file).read_bytes())
        if sidecar.committed and file.stat().st_size == sidecar.size:
            return sidecar
    return None
