"""`LATEST`: which of a folder's checkpoints is the newest, and the fence around it.

The fence: `LATEST` never goes back to a lower round or step of a job, and never from one job to another, except from
exactly the checkpoint that the other job's run was continued from: no two live jobs may share a folder (decision "Whose
LATEST may be replaced"). What a rollback undid is never named again: `LATEST` says itself what that is (`rollback`
writes it), so that no late publication of such a state is taken.
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
    """A sentence: somebody else has the right to write here."""


@dataclasses.dataclass(frozen=True)
class Latest:
    durable: Optional[Durable]  # noqa: UP045 (typed_json knows typing's form)
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


def move_latest(folder: ObjectPrefix, durable: Durable, key: str, crc32: int, continued: Continued | None) -> Durable:
    """To the manifest `key`; what it names then. Raises StorageError, or Fenced."""

    def moved(found: Latest | None) -> Latest | None:
        check_fence(durable, continued, found)
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


def check_fence(ours: Durable, continued: Continued | None, found: Latest | None) -> None:
    """Raises Fenced."""
    check_round(ours, found)
    theirs = found.durable if found else None
    if theirs is None or theirs.uid == ours.uid or continued == Continued(theirs.uid, theirs.round, theirs.step):
        return
    raise Fenced(
        f"{LATEST} belongs to another job (uid {theirs.uid}, round {theirs.round}, step {theirs.step}): two jobs "
        "can't share a checkpoint URI. Give this job a URI of its own, or delete the other one."
    )


def check_round(ours: Durable, found: Latest | None) -> None:
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
        latest = parse_json(Latest, found[0])
    except ValueError as error:
        raise StorageError(
            f"{folder.uri}/LATEST is damaged ({error}): correct it by hand or use another URI."
        ) from error
    return dataclasses.replace(latest, durable=latest.durable and _lying_in(folder, latest.durable)), found[1]


def _lying_in(folder: ObjectPrefix, durable: Durable) -> Durable:
    """Where it lies now: the run's folder may have been moved since this was written, or copied as a whole."""
    place = CheckpointKey(durable.uid, durable.round, durable.step)
    return dataclasses.replace(durable, uri=f"{folder.uri}/{place.folder}")
