"""`OWNER`: the job that writes to a folder of checkpoints (decision "The store decides who owns a folder").

The first job that writes there creates it conditionally. Another job takes over by a conditional write, if its user
names the owner in `checkpoint.takeOver`, or if the owner was a job of the same namespace and is gone.
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
    """The checkpoint that `LATEST` named."""

    uid: str
    round: int
    step: int


@dataclasses.dataclass(frozen=True)
class Owner:
    uid: str
    namespace: str
    name: str
    """Of the TrainingJob."""
    latest: Optional[Position] = None  # noqa: UP045 (typed_json knows typing's form)
    """When this job became the owner; None: there was no checkpoint."""


class Ownership(enum.Enum):
    """A verdict on a job that wants to use a folder."""

    OWNS = "Owns"
    CREATE = "Create"
    TAKE_OVER = "TakeOver"
    UNDECIDED = "Undecided"
    """The owner was a job of the same namespace, and the operator has not said yet whether it lives."""
    REFUSED = "Refused"


class NotOwner(StoreRefused):
    """Another job owns the folder."""


def this_job(uid: str) -> Owner:
    namespace, _, name = os.environ.get("CONCERTINA_JOB", "").partition("/")
    return Owner(uid, namespace, name)


def decide(found: Owner | None, job: Owner, living: Collection[str] | None, take_over: str) -> Ownership:
    """Decide what `job` may do in a folder whose owner is `found`.

    `living`: uids of the other live jobs of its namespace that may use the folder; None: the operator has not said.
    `take_over`: the uid in spec.checkpoint.takeOver."""
    if found is None:
        return Ownership.CREATE
    if found.uid == job.uid:
        return Ownership.OWNS
    if found.uid == take_over:
        return Ownership.TAKE_OVER
    if found.namespace != job.namespace:
        return Ownership.REFUSED
    if living is None:
        return Ownership.UNDECIDED
    return Ownership.REFUSED if found.uid in living else Ownership.TAKE_OVER


def look(folder: ObjectPrefix, job: Owner, take_over: str) -> bool:
    """Return whether the job owns the folder. Writes nothing. Raises NotOwner where it never may, or StorageError."""
    found, _ = _read(folder)
    claim = decide(found, job, None, take_over)
    if claim is Ownership.REFUSED:
        raise _refusal(folder, found, job)
    return claim is Ownership.OWNS


def claim(folder: ObjectPrefix, job: Owner, living: Collection[str], take_over: str, latest: Durable | None) -> None:
    """Make the job the owner of the folder. `latest`: what `LATEST` names. Raises NotOwner, or StorageError."""
    position = Position(latest.uid, latest.round, latest.step) if latest else None
    text = to_json(dataclasses.replace(job, latest=position))
    for _ in range(ATTEMPTS):
        found, version = _read(folder)
        verdict = decide(found, job, living, take_over)
        if verdict is Ownership.OWNS:
            return
        if verdict is Ownership.REFUSED:
            raise _refusal(folder, found, job)
        with contextlib.suppress(Changed):  # by another first writer, or another pod of this job: look again
            folder.put_if(OWNER, text, version)
            if verdict is Ownership.CREATE:
                _check_conditional(folder, text)
            return
    raise StorageError(f"{folder.uri}/{OWNER} changes all the time: do several jobs write here?")


def took_over_from(folder: ObjectPrefix, uid: str) -> str:
    """Uid of the job whose checkpoint `LATEST` named when this job became the owner; empty where this job is not the
    owner, or there was none. Raises StorageError."""
    found, _ = _read(folder)
    return found.latest.uid if found and found.uid == uid and found.latest else ""


def _check_conditional(folder: ObjectPrefix, text: bytes) -> None:
    """Create the object once more, which a store must refuse: some ignore the condition and overwrite."""
    try:
        folder.put_if(OWNER, text, None)
    except Changed:
        return
    folder.delete([OWNER])  # or a second try would find an owner, and ask no more
    raise StoreRefused(
        f"{folder.store_name} ignores conditional writes (If-None-Match), so two jobs in {folder.uri} would overwrite "
        "each other's checkpoints: use a store that has them, or switch them on there."
    )


def _read(folder: ObjectPrefix) -> tuple[Owner | None, UpdateVersion | None]:
    found = folder.get_version(OWNER)
    if found is None:
        return None, None
    try:
        return parse_json(Owner, found[0]), found[1]
    except ValueError as error:
        raise StorageError(
            f"{folder.uri}/{OWNER} is damaged ({error}): delete it if no other job uses the folder, or use another URI."
        ) from error


def _refusal(folder: ObjectPrefix, found: Owner | None, job: Owner) -> NotOwner:
    assert found is not None
    why = "of another namespace" if found.namespace != job.namespace else "which still exists"
    return NotOwner(
        f"{folder.uri} belongs to the TrainingJob {found.namespace}/{found.name} (uid {found.uid}), {why}: give this "
        f"job another checkpoint.uri, or set checkpoint.takeOver: {found.uid} once that job writes there no more."
    )
