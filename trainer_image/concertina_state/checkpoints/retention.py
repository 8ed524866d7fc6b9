"""Retention of checkpoints. A checkpoint is not deleted while it is being read.

Before reading the manifest, a reader creates a lease, which is an object in `<checkpoint>/readers/`. A process that
deletes a checkpoint first removes the manifest and then looks for leases. If the process finds a lease, it puts the
manifest back. Only two cases are therefore possible: the reader finds no manifest and uses a newer checkpoint, or the
deleting process finds the lease (decision "Readers of checkpoints hold leases"). A lease expires after six hours, in
case its reader has died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping

from concertina_protocol import Durable, Undone
from concertina_state.checkpoints.latest import read_latest
from concertina_state.checkpoints.manifest import NAME, CheckpointKey
from concertina_state.objects.prefix import ObjectEntry, ObjectPrefix, StorageError

LEASE = datetime.timedelta(hours=6)
READERS = "readers"


@dataclasses.dataclass(frozen=True)
class Keeping:
    """Rules that say which checkpoints of a job to keep in storage."""

    newest: int
    every: int | None = None
    """Interval in steps, or None. The first checkpoint in each interval is kept."""
    back: tuple[int, ...] = ()
    """Numbers of steps by which a rollback may go back.

    For each number n, the newest checkpoint that is at least n steps older than LATEST is kept, in addition to the
    `newest` checkpoints.
    """
    best: CheckpointKey | None = None
    """Checkpoint with the lowest evaluation loss, which is kept, or None."""


def doomed(
    keys: Collection[CheckpointKey],
    finished: Collection[CheckpointKey],
    latest: CheckpointKey,
    keeping: Keeping,
    undone: Iterable[Undone] = (),
) -> list[CheckpointKey]:
    """Return the checkpoints that may be deleted, oldest first.

    - A checkpoint that a rollback has undone is kept only if `latest` is this checkpoint.
    - Shards of an unfinished checkpoint are kept as long as no newer checkpoint is finished. Until then, the checkpoint
      can still be finished.
    - A checkpoint whose uid differs from that of `latest` is from a job that this job continued, and counts as older.
    """
    rollbacks, age = tuple(undone), functools.partial(_age, latest)

    def is_void(key: CheckpointKey) -> bool:
        return key.uid == latest.uid and any(rollback.covers(key.round, key.step) for rollback in rollbacks)

    ordered = [key for key in sorted(finished, key=age) if not is_void(key)]
    kept_keys = {*ordered[-keeping.newest :], latest, *([keeping.best] if keeping.best else [])}
    if keeping.every is not None:
        kept_keys |= set(_milestones(ordered, keeping.every))
    for steps in keeping.back:
        kept_keys |= set([key for key in ordered if key.step <= latest.step - steps][-1:])
    passed = [key for key in keys if key not in finished and age(key) < age(latest)]
    return sorted([*(key for key in finished if key not in kept_keys), *passed], key=age)


def _age(latest: CheckpointKey, key: CheckpointKey) -> tuple[bool, int, int]:
    return key.uid == latest.uid, key.round, key.step


def _milestones(ordered: list[CheckpointKey], every: int) -> Iterator[CheckpointKey]:
    """Yield the checkpoints to keep forever: the first one in each interval of `every` steps.

    If a later round has trained the steps of a checkpoint again, the checkpoint is left out.
    """
    current: list[CheckpointKey] = []
    for key in ordered:
        current = [*(before for before in current if before.step < key.step), key]
    for number, group in itertools.groupby(current, key=lambda key: key.step // every):
        if number:
            yield next(group)


def sweep(
    folder: ObjectPrefix, latest: Durable, before: Collection[str], undone: Iterable[Undone], keeping: Keeping
) -> list[CheckpointKey]:
    """Delete the checkpoints of this job that `keeping` does not require, except the best one, and return them.

    `before` contains the uids of earlier jobs whose checkpoints are deleted by the same rules: the job that this job
    continued, and the job of the previous best checkpoint.
    """
    entries = folder.entries(latest.uid)
    drafts = list(folder.drafts(latest.uid))
    for uid in before:
        entries |= folder.entries(uid)
        drafts += folder.drafts(uid)
    # Another process may have named other checkpoints since `latest` was written. LATEST is read after the listing, so
    # that everything which it names and which the listing contains is kept.
    named = read_latest(folder)
    if best := (named.best if named else None) or latest.best:
        keeping = dataclasses.replace(keeping, best=CheckpointKey.named_by(best))
    here = CheckpointKey.named_by(latest)
    folder.drop_drafts(key for key in drafts if _passed(key, here))  # listings do not include drafts
    keys, finished = found(entries)
    now = max((entry.at for entry in entries.values()), default=None)
    doomed_keys = doomed(keys, finished, here, keeping, undone)
    return [checkpoint for checkpoint in doomed_keys if now is not None and remove(folder, checkpoint, now)]


def _passed(key: str, latest: CheckpointKey) -> bool:
    """Return whether a checkpoint is older than `latest`, the checkpoint from which the job continues.

    If such a checkpoint is unfinished, no process can finish it any more.
    """
    where = CheckpointKey.of(key)
    return where is not None and _age(latest, where[0]) < _age(latest, latest)


def found(entries: Mapping[str, ObjectEntry]) -> tuple[set[CheckpointKey], set[CheckpointKey]]:
    """Return two sets: all checkpoints in a listing of a run's folder, and the checkpoints that have a manifest."""
    keys = [where for key in entries if (where := CheckpointKey.of(key))]
    return {checkpoint for checkpoint, _ in keys}, {checkpoint for checkpoint, rest in keys if rest == NAME}


def since(entries: Mapping[str, ObjectEntry], key: str) -> set[CheckpointKey]:
    """Return the checkpoints with an object that is not older than the object `key`.

    Ages are measured by the store's clock.
    """
    written_at = entries[key].at if key in entries else None
    written_keys = (
        CheckpointKey.of(name) for name, entry in entries.items() if written_at is None or entry.at >= written_at
    )
    return {where[0] for where in written_keys if where and not where[1].startswith(f"{READERS}/")}


def remove(folder: ObjectPrefix, checkpoint: CheckpointKey, now: datetime.datetime) -> bool:
    """Delete a checkpoint unless it is being read, and return whether it was deleted.

    `now` is the time by the store's clock. The manifest is deleted first, so that no manifest names a deleted shard.
    """
    here = checkpoint.folder
    if _leased(folder, here, now):
        return False
    manifest = folder.get(f"{here}/{NAME}")
    if manifest is not None:
        folder.delete([f"{here}/{NAME}"])
        if _leased(folder, here, now):
            folder.put(f"{here}/{NAME}", manifest)
            return False
    folder.drop_drafts(folder.drafts(here))
    folder.delete(list(folder.entries(here)))
    return True


def _leased(folder: ObjectPrefix, here: str, now: datetime.datetime) -> bool:
    return any(entry.at > now - LEASE for entry in folder.entries(f"{here}/{READERS}").values())


@contextlib.contextmanager
def lease(folder: ObjectPrefix) -> Iterator[None]:
    """Hold a lease on a checkpoint while it is being read. `folder` is the checkpoint's own folder.

    A reader without write permission reads without a lease. If the checkpoint is deleted during the read, the reader
    gets an error that advises to try again.
    """
    key = f"{READERS}/{secrets.token_hex(8)}"
    try:
        folder.put(key, b"{}")
    except StorageError:
        key = ""
    try:
        yield
    finally:
        if key:
            with contextlib.suppress(StorageError):
                folder.delete([key])
