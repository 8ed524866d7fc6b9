"""Which checkpoints are kept, and how the others go without taking anything away from who is reading them.

A reader puts a lease (an object in `<checkpoint>/readers/`) before it looks at the manifest. Who deletes takes the
manifest away first, and looks for leases then: where one is found, the manifest is put back. So either the reader finds
no manifest and takes the newer checkpoint, or its lease is seen (decision "Readers hold leases"). Leases of readers
that died run out.
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
from concertina_state.checkpoints.manifest import NAME, CheckpointKey
from concertina_state.objects.prefix import ObjectEntry, ObjectPrefix, StorageError

LEASE = datetime.timedelta(hours=6)
READERS = "readers"


@dataclasses.dataclass(frozen=True)
class Keeping:
    """What stays."""

    newest: int
    every: int | None = None
    """Of every so many steps the first."""
    back: tuple[int, ...] = ()
    """Steps that a rollback may undo: for each of these, one from before stays, whatever `newest` says."""


def doomed(
    places: Collection[CheckpointKey],
    finished: Collection[CheckpointKey],
    latest: CheckpointKey,
    keeping: Keeping,
    undone: Iterable[Undone] = (),
) -> list[CheckpointKey]:
    """What may go, oldest first. What was undone stays only as LATEST names it; parts of unfinished ones stay while
    they can still be finished, which is as long as LATEST has not passed them. Other uids than `latest`'s are those of
    jobs that it went on from, and older."""
    void, age = tuple(undone), functools.partial(_age, latest)

    def is_void(place: CheckpointKey) -> bool:
        return place.uid == latest.uid and any(some.covers(place.round, place.step) for some in void)

    ordered = [place for place in sorted(finished, key=age) if not is_void(place)]
    kept = {*ordered[-keeping.newest :], latest}
    if keeping.every is not None:
        kept |= set(_milestones(ordered, keeping.every))
    for steps in keeping.back:
        kept |= set([place for place in ordered if place.step <= latest.step - steps][-1:])
    passed = [place for place in places if place not in finished and age(place) < age(latest)]
    return sorted([*(place for place in finished if place not in kept), *passed], key=age)


def _age(latest: CheckpointKey, place: CheckpointKey) -> tuple[bool, int, int]:
    return place.uid == latest.uid, place.round, place.step


def _milestones(ordered: list[CheckpointKey], every: int) -> Iterator[CheckpointKey]:
    """The first of every `every` steps, of those that no later round has gone over again."""
    current: list[CheckpointKey] = []
    for place in ordered:
        current = [*(before for before in current if before.step < place.step), place]
    for number, group in itertools.groupby(current, key=lambda place: place.step // every):
        if number:
            yield next(group)


def sweep(
    folder: ObjectPrefix, latest: Durable, before: str, undone: Iterable[Undone], keeping: Keeping
) -> list[CheckpointKey]:
    """Delete what may go, of this job and of the one with uid `before` that it went on from ("": none)."""
    entries = folder.entries(latest.uid) | (folder.entries(before) if before else {})
    here = CheckpointKey(latest.uid, latest.round, latest.step)
    begun = folder.drafts(latest.uid) + (folder.drafts(before) if before else ())
    folder.drop_drafts(key for key in begun if _passed(key, here))  # by no listing are they seen
    places, finished = found(entries)
    now = max((entry.at for entry in entries.values()), default=None)
    gone = doomed(places, finished, here, keeping, undone)
    return [place for place in gone if now is not None and remove(folder, place, now)]


def _passed(key: str, latest: CheckpointKey) -> bool:
    """Of a part of a checkpoint that can't be finished any more, or is without this one."""
    where = CheckpointKey.of(key)
    return where is not None and _age(latest, where[0]) < _age(latest, latest)


def found(entries: Mapping[str, ObjectEntry]) -> tuple[set[CheckpointKey], set[CheckpointKey]]:
    """All places, and those with a manifest, in a listing of a run's folder."""
    keys = [where for key in entries if (where := CheckpointKey.of(key))]
    return {place for place, _ in keys}, {place for place, rest in keys if rest == NAME}


def since(entries: Mapping[str, ObjectEntry], key: str) -> set[CheckpointKey]:
    """Places of which something was written when this object was, or later, by the store's clock."""
    at = entries[key].at if key in entries else None
    late = (CheckpointKey.of(each) for each, entry in entries.items() if at is None or entry.at >= at)
    return {where[0] for where in late if where and not where[1].startswith(f"{READERS}/")}


def remove(folder: ObjectPrefix, place: CheckpointKey, now: datetime.datetime) -> bool:
    """Delete one checkpoint unless somebody reads it. `now`: by the store's clock. The manifest goes first, so that no
    manifest ever names a part that is gone."""
    here = place.folder
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
    """Around reading a checkpoint, `folder` being its own. Who may only read goes without: parts that are deleted
    meanwhile are then named, with the advice to try again."""
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
