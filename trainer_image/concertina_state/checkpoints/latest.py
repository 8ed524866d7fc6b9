"""The object `LATEST`, which names the newest checkpoint of a folder, and the rules for changing it.

`LATEST` never moves back to an earlier round or step of a job. If `LATEST` names a checkpoint of another job, a job may
change `LATEST` only if it was started from exactly that checkpoint. Two running jobs therefore can't share a folder
(decision "Replacement of another job's LATEST").

`LATEST` also lists the states that a rollback has undone (see `rollback`). `LATEST` never names a checkpoint of such a
state again, even if that checkpoint is published later.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Optional

from concertina_protocol import BestCheckpoint, Durable, Undone
from concertina_protocol.codec.typed_json import parse_json
from concertina_state.checkpoints.manifest import CheckpointKey, to_json
from concertina_state.format.shardfile import Continued
from concertina_state.objects.prefix import Changed, ObjectPrefix, StorageError

if TYPE_CHECKING:
    from obstore import UpdateVersion

LATEST = "LATEST"


class Fenced(Exception):
    """Error that this job may not publish a checkpoint, because another job or a later round has published one.

    The error's text is a sentence for users.

    A round is a period in which a fixed set of replicas trains.
    """


@dataclasses.dataclass(frozen=True)
class Latest:
    """Contents of `LATEST`."""

    durable: Optional[Durable]
    """Newest checkpoint, or None if no usable checkpoint is left."""
    manifest: str
    """Key of the manifest of the newest checkpoint, relative to the folder."""
    crc32: int
    """crc32 of the manifest of the newest checkpoint."""
    undone: tuple[Undone, ...] = ()
    """Ranges of states that rollbacks have made invalid, by increasing round."""
    undone_uid: str = ""
    """Uid of the job to which `undone` applies."""

    def undid(self, uid: str) -> tuple[Undone, ...]:
        return self.undone if uid == self.undone_uid else ()

    def voids(self, uid: str, round: int, step: int) -> Undone | None:
        """Return the rollback that has undone the state of this round and step, or None if no rollback has."""
        return next((undone for undone in self.undid(uid) if undone.covers(round, step)), None)


def move_latest(
    folder: ObjectPrefix,
    durable: Durable,
    key: str,
    crc32: int,
    continued: Continued | None,
    best: Callable[[BestCheckpoint | None], BestCheckpoint | None] = lambda best: None,
) -> Durable:
    """Make `LATEST` name the checkpoint `durable`, and return the checkpoint that `LATEST` names afterwards.

    Args:
        folder: Folder of the run.
        durable: The checkpoint.
        key: Key of the checkpoint's manifest.
        crc32: crc32 of the checkpoint's manifest.
        continued: Checkpoint of another job from which this job continued, or None.
        best: Function that returns the best checkpoint for `LATEST`, given the best checkpoint that `LATEST` named
            before.

    Raises:
        StorageError: When `LATEST` can't be read or written.
        Fenced: When the folder belongs to another job, or to a later round of this job.
    """

    def moved(current: Latest | None) -> Latest | None:
        check_fence(durable, continued, current)
        if current and current.durable and _identity(current.durable) == _identity(durable):
            return None  # an earlier attempt of this write has succeeded
        before = current.durable.best if current and current.durable else None
        named = dataclasses.replace(durable, best=best(before))
        return Latest(named, key, crc32, current.undid(durable.uid) if current else (), durable.uid)

    latest = change_latest(folder, moved)
    assert latest is not None
    assert latest.durable is not None
    return latest.durable


def change_latest(folder: ObjectPrefix, change: Callable[[Latest | None], Latest | None]) -> Latest | None:
    """Change the object `LATEST` by a conditional write, and return its new contents.

    The function `change` receives the present contents and returns the new ones. If `change` returns None, `LATEST` is
    not written.

    Raises:
        StorageError: When `LATEST` can't be read or written, or when other writers change `LATEST` before each attempt.
    """
    for _ in range(10):
        current, version = _read_latest(folder)
        if (replacement := change(current)) is None:
            return current
        with contextlib.suppress(Changed):
            folder.put_if(LATEST, to_json(replacement), version)
            return replacement
    raise StorageError(f"{folder.uri}/LATEST changed in each of 10 attempts: check whether another job writes there.")


def check_fence(ours: Durable, continued: Continued | None, latest: Latest | None) -> None:
    """Check that this job may make the object `LATEST` name the checkpoint `ours`.

    `LATEST` must not name a later checkpoint of this job. If `LATEST` names a checkpoint of another job, this job must
    have continued from exactly that checkpoint.

    Raises:
        Fenced: When this job may not change `LATEST`.
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
    """Check that this job may publish the checkpoint `ours`, given the present contents of `LATEST`.

    A checkpoint of an earlier round may be published until a later round has published one. To prevent such a
    publication, each round would have to begin with a write to storage, and no round could begin while storage is
    unavailable (decision "No fence at the start of a round").

    Raises:
        Fenced: When a rollback has undone the state, or `LATEST` names a checkpoint of a later round or step.
    """
    if latest is None:
        return
    if undo := latest.voids(ours.uid, ours.round, ours.step):
        raise Fenced(
            f"step {ours.step} of round {ours.round} is no longer valid: training went back to step "
            f"{undo.step} and continues in a later round."
        )
    current = latest.durable
    if current is not None and current.uid == ours.uid and _identity(current) > _identity(ours):
        raise Fenced(
            f"{LATEST} is already at round {current.round}, step {current.step} of this job: the older "
            f"round {ours.round}, step {ours.step} is refused."
        )


def _identity(durable: Durable) -> tuple[str, int, int]:
    return durable.uid, durable.round, durable.step


def read_latest(folder: ObjectPrefix) -> Durable | None:
    """Return the checkpoint that `LATEST` names, or None if `LATEST` does not exist or names no checkpoint.

    Raises:
        StorageError: When `LATEST` can't be read.
    """
    latest = read_all_of_latest(folder)
    return latest.durable if latest else None


def read_all_of_latest(folder: ObjectPrefix) -> Latest | None:
    """Return the contents of `LATEST`, including the undone states, or None if `LATEST` does not exist.

    Raises:
        StorageError: When `LATEST` can't be read.
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
            f"{folder.uri}/LATEST is damaged ({error}): correct the file by hand, or use another URI."
        ) from error
    return dataclasses.replace(latest, durable=latest.durable and _lying_in(folder, latest.durable)), versioned[1]


def _lying_in(folder: ObjectPrefix, durable: Durable) -> Durable:
    """Return the checkpoint `durable` with its URI set to `folder`.

    The URI in `LATEST` can be outdated, because the run's folder may have been moved or copied.
    """
    key = CheckpointKey.named_by(durable)
    return dataclasses.replace(durable, uri=f"{folder.uri}/{key.folder}")
