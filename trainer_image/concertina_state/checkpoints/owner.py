"""The object `OWNER`, which names the job that may write to a folder of checkpoints.

The first job that writes to the folder creates `OWNER` by a conditional write. Another job can replace the owner in two
cases (decision "Ownership of a checkpoint folder"):
- The user names the owner's uid in `checkpoint.takeOver`.
- The owner was a job of the same namespace that no longer exists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Optional

from concertina_protocol import Durable
from concertina_protocol.codec.typed_json import parse_json
from concertina_state.checkpoints.manifest import to_json
from concertina_state.objects.prefix import Changed, ObjectPrefix, StorageError, StoreRefused

if TYPE_CHECKING:
    from obstore import UpdateVersion

OWNER = "OWNER"
ATTEMPTS = 10


@dataclasses.dataclass(frozen=True)
class Position:
    """Checkpoint that `LATEST` named when the folder's owner was recorded."""

    uid: str
    round: int
    step: int


@dataclasses.dataclass(frozen=True)
class Owner:
    """Job that owns a folder."""

    uid: str
    namespace: str
    name: str
    """Name of the TrainingJob."""
    latest: Optional[Position] = None
    """Checkpoint that `LATEST` named when this job became the owner, or None if `LATEST` named none."""


class Ownership(enum.Enum):
    """Relation between a job and a checkpoint folder, which decides how the job may use the folder."""

    OWNS = "Owns"
    CREATE = "Create"
    TAKE_OVER = "TakeOver"
    UNDECIDED = "Undecided"
    """The owner is a job of the same namespace, and the operator has not reported yet whether that job still exists."""
    REFUSED = "Refused"


class NotOwner(StoreRefused):
    """Error that this job may not use a checkpoint folder, because another job owns the folder."""


def this_job(uid: str) -> Owner:
    namespace, _, name = os.environ.get("CONCERTINA_JOB", "").partition("/")
    return Owner(uid, namespace, name)


def decide(owner: Owner | None, job: Owner, living: Collection[str] | None, take_over: str) -> Ownership:
    """Decide what `job` may do in a folder that `owner` owns.

    Args:
        owner: Present owner of the folder, or None.
        job: Job that wants to use the folder.
        living: Uids of the other existing jobs of the namespace that may use the folder, or None if the operator has
            not reported them.
        take_over: The uid in spec.checkpoint.takeOver.
    """
    if owner is None:
        return Ownership.CREATE
    if owner.uid == job.uid:
        return Ownership.OWNS
    if owner.uid == take_over:
        return Ownership.TAKE_OVER
    if owner.namespace != job.namespace:
        return Ownership.REFUSED
    if living is None:
        return Ownership.UNDECIDED
    return Ownership.REFUSED if owner.uid in living else Ownership.TAKE_OVER


def look(folder: ObjectPrefix, job: Owner, take_over: str) -> bool:
    """Return whether `job` already owns the folder. The function writes nothing to storage.

    Raises:
        NotOwner: When another job owns the folder and `job` must not replace it.
        StorageError: When durable storage can't be read.
    """
    owner, _ = _read(folder)
    claim = decide(owner, job, None, take_over)
    if claim is Ownership.REFUSED:
        raise _refusal(folder, owner, job)
    return claim is Ownership.OWNS


def claim(folder: ObjectPrefix, job: Owner, living: Collection[str], take_over: str, latest: Durable | None) -> None:
    """Make the job the owner of the folder. `latest` is the checkpoint that `LATEST` names.

    Raises:
        NotOwner: When another job owns the folder.
        StorageError: When durable storage can't be read or written.
    """
    position = Position(latest.uid, latest.round, latest.step) if latest else None
    text = to_json(dataclasses.replace(job, latest=position))
    for _ in range(ATTEMPTS):
        owner, version = _read(folder)
        verdict = decide(owner, job, living, take_over)
        if verdict is Ownership.OWNS:
            return
        if verdict is Ownership.REFUSED:
            raise _refusal(folder, owner, job)
        with contextlib.suppress(Changed):  # another writer was first: read OWNER again
            folder.put_if(OWNER, text, version)
            if verdict is Ownership.CREATE:
                _check_conditional(folder, text)
            return
    raise StorageError(f"{folder.uri}/{OWNER} changes again and again: check whether several jobs write there.")


def took_over_from(folder: ObjectPrefix, uid: str) -> str:
    """Return the uid of the job whose checkpoint `LATEST` named when the job `uid` became the owner of the folder.

    The result is "" if the job `uid` is not the owner, or if `LATEST` named no checkpoint.

    Raises:
        StorageError: When durable storage can't be read.
    """
    owner, _ = _read(folder)
    return owner.latest.uid if owner and owner.uid == uid and owner.latest else ""


def _check_conditional(folder: ObjectPrefix, text: bytes) -> None:
    """Check that the store refuses a conditional request to create an object that already exists.

    Some stores ignore this condition, and overwrite the object.

    Raises:
        StoreRefused: When the store ignores the condition.
    """
    try:
        folder.put_if(OWNER, text, None)
    except Changed:
        return
    folder.delete([OWNER])  # otherwise a second attempt would find an owner, and skip this check
    raise StoreRefused(
        f"{folder.store_name} ignores conditional writes (If-None-Match), so two jobs in {folder.uri} would "
        "overwrite each other's checkpoints: use a store that supports them, or enable them there."
    )


def _read(folder: ObjectPrefix) -> tuple[Owner | None, UpdateVersion | None]:
    versioned = folder.get_version(OWNER)
    if versioned is None:
        return None, None
    try:
        return parse_json(Owner, versioned[0]), versioned[1]
    except ValueError as error:
        raise StorageError(
            f"{folder.uri}/{OWNER} is damaged ({error}): delete it if no other job uses the folder, or use another URI."
        ) from error


def _refusal(folder: ObjectPrefix, owner: Owner | None, job: Owner) -> NotOwner:
    assert owner is not None
    why = "of another namespace" if owner.namespace != job.namespace else "which still exists"
    return NotOwner(
        f"{folder.uri} belongs to the TrainingJob {owner.namespace}/{owner.name} (uid {owner.uid}), {why}: "
        f"give this job another checkpoint.uri, or set checkpoint.takeOver: {owner.uid} once that job no "
        "longer writes there."
    )
