"""`LATEST`: which of a folder's checkpoints is the newest, and the fence around it.

The fence: `LATEST` never goes back to a lower round or step of a job, and never moves from one job to another, except
from exactly the checkpoint that the other job's run was continued from. So two live jobs can't share a folder (decision
"Replacement of another job's LATEST"). `LATEST` also says which states a rollback has undone (`rollback` writes this).
Such a state is never named again, even if it is published late.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Optional

from concertina_protocol import Durable, Undone
from concertina_protocol.codec.typed_json import parse_json
from concertina_state.checkpoints.manifest import CheckpointKey, to_json
from concertina_state.format.shardfile import Continued
from concertina_state.objects.prefix import Changed, ObjectPrefix, StorageError

if TYPE_CHECKING:
    from obstore import UpdateVersion

LATEST = "LATEST"


class Fenced(Exception):
    """Another job, or a later round, has the right to write here. The message is a sentence."""


@dataclasses.dataclass(frozen=True)
class Latest:
    """Contents of `LATEST`."""

    durable: Optional[Durable]
    """Newest checkpoint; None if no good one is left."""
    manifest: str
    """Key of the manifest, below the checkpoint URI."""
    crc32: int
    """Checksum of the manifest."""
    undone: tuple[Undone, ...] = ()
    """States that rollbacks have made void, by rising rounds."""
    undone_uid: str = ""
    """Uid of the job to which `undone` applies."""

    def undid(self, uid: str) -> tuple[Undone, ...]:
        return self.undone if uid == self.undone_uid else ()

    def voids(self, uid: str, round: int, step: int) -> Undone | None:
        """Return the rollback that has undone this state, or None."""
        return next((undone for undone in self.undid(uid) if undone.covers(round, step)), None)


def move_latest(folder: ObjectPrefix, durable: Durable, key: str, crc32: int, continued: Continued | None) -> Durable:
    """Point `LATEST` at the manifest `key`, and return the checkpoint that it names then.

    Raises:
        StorageError: When `LATEST` can't be read or written.
        Fenced: When another job, or a later round, has the right to write here.
    """

    def moved(current: Latest | None) -> Latest | None:
        check_fence(durable, continued, current)
        if current and current.durable and _identity(current.durable) == _identity(durable):
            return None  # an earlier attempt succeeded
        return Latest(durable, key, crc32, current.undid(durable.uid) if current else (), durable.uid)

    latest = change_latest(folder, moved)
    assert latest is not None
    assert latest.durable is not None
    return latest.durable


def change_latest(folder: ObjectPrefix, change: Callable[[Latest | None], Latest | None]) -> Latest | None:
    """Change `LATEST` by a conditional write, and return its new contents.

    If `change` returns None, it stays as it is.

    Raises:
        StorageError: When it can't be read or written, or changes all the time.
    """
    for _ in range(10):
        current, version = _read_latest(folder)
        if (replacement := change(current)) is None:
            return current
        with contextlib.suppress(Changed):
            folder.put_if(LATEST, to_json(replacement), version)
            return replacement
    raise StorageError(f"{folder.uri}/LATEST changes all the time: is another job writing here?")


def check_fence(ours: Durable, continued: Continued | None, latest: Latest | None) -> None:
    """Check that this job may move `LATEST` to the checkpoint `ours`.

    Raises:
        Fenced: When it may not.
    """
    check_round(ours, latest)
    current = latest.durable if latest else None
    if current is None or current.uid == ours.uid or continued == Continued(current.uid, current.round, current.step):
        return
    raise Fenced(
        f"{LATEST} belongs to another job (uid {current.uid}, round {current.round}, step {current.step}): two jobs "
        "can't share a checkpoint URI. Give this job a URI of its own, or delete the other one."
    )


def check_round(ours: Durable, latest: Latest | None) -> None:
    """Check the fence among checkpoints of one job.

    A lower round is refused once a higher one has published, not when the higher one is claimed. That would require
    storage to begin a round (decision "No fence at the start of a round").

    Raises:
        Fenced: When the state was undone, or `LATEST` is at a later one.
    """
    if latest is None:
        return
    if undo := latest.voids(ours.uid, ours.round, ours.step):
        raise Fenced(
            f"step {ours.step} of round {ours.round} was undone: training went back to step {undo.step}, and goes on "
            "in a later round."
        )
    current = latest.durable
    if current is not None and current.uid == ours.uid and _identity(current) > _identity(ours):
        raise Fenced(
            f"{LATEST} is already at round {current.round}, step {current.step} of this job: round {ours.round}, step "
            f"{ours.step} is of an older world and is not taken."
        )


def _identity(durable: Durable) -> tuple[str, int, int]:
    return durable.uid, durable.round, durable.step


def read_latest(folder: ObjectPrefix) -> Durable | None:
    """Return the checkpoint that `LATEST` names, or None.

    Raises:
        StorageError: When `LATEST` can't be read.
    """
    latest = read_all_of_latest(folder)
    return latest.durable if latest else None


def read_all_of_latest(folder: ObjectPrefix) -> Latest | None:
    """Return the contents of `LATEST`, including the undone states, or None if it does not exist.

    Raises:
        StorageError: When it can't be read.
    """
    return _read_latest(folder)[0]


def _read_latest(folder: ObjectPrefix) -> tuple[Latest | None, UpdateVersion | None]:
    versioned = folder.get_version(LATEST)
    if versioned is None:
        return None, None
    try:
        latest = parse_json(Latest, versioned[0])
    except ValueError as error:
        raise StorageError(
            f"{folder.uri}/LATEST is damaged ({error}): correct it by hand or use another URI."
        ) from error
    return dataclasses.replace(latest, durable=latest.durable and _lying_in(folder, latest.durable)), versioned[1]


def _lying_in(folder: ObjectPrefix, durable: Durable) -> Durable:
    """Return the checkpoint with its present URI.

    The run's folder may have been moved or copied since this was written.
    """
    key = CheckpointKey(durable.uid, durable.round, durable.step)
    return dataclasses.replace(durable, uri=f"{folder.uri}/{key.folder}")
