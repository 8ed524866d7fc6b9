"""Going back in durable storage: `LATEST` names the newest checkpoint that was not undone, and says what was, as an
undone one may be published late (decision "LATEST says what was undone")."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import reduce

from concertina_protocol import Durable, Restore, Rollback, Undone
from concertina_protocol.messages.undone import joined
from concertina_state.checkpoints.catalogue import run_of
from concertina_state.checkpoints.latest import Latest, change_latest, read_all_of_latest
from concertina_state.checkpoints.manifest import NAME, CheckpointKey, Manifest, parse
from concertina_state.checkpoints.retention import found
from concertina_state.errors import DamagedInput, InvalidInput
from concertina_state.objects.prefix import ObjectPrefix


def undo(folder: ObjectPrefix, uid: str, undone: Undone) -> Durable | None:
    """From now on `LATEST` names nothing of this job that was undone, and takes nothing of it. Returns what it names.
    Again does no harm; a `LATEST` of a later round is past it. Raises StorageError."""

    def without(latest: Latest | None) -> Latest | None:
        before = latest.undid(uid) if latest else ()
        void = joined(before, undone)
        named = latest.durable if latest else None
        if void == before or (named and named.uid == uid and named.round > undone.round):
            return None
        if latest and named and not (named.uid == uid and undone.covers(named.round, named.step)):
            return Latest(named, latest.manifest, latest.crc32, void, uid)
        return newest(folder, uid, void) or Latest(None, "", 0, void, uid)

    now = change_latest(folder, without)
    return now.durable if now else None


def go_back(uri: str, uid: str, *undone: Undone, damaged: Collection[str] = ()) -> Durable | None:
    """The newest checkpoint of this job that was not undone, now or before, or of the one that it went on from; None
    where none is left. `damaged`: URIs of checkpoints to pass over. Raises StorageError."""
    folder = ObjectPrefix(uri)
    latest = read_all_of_latest(folder)
    good = newest(folder, uid, reduce(joined, undone, latest.undid(uid) if latest else ()), damaged)
    return good.durable if good else None


def before_damaged(damaged: DamagedInput, uri: str, uid: str, restore: Restore) -> Rollback | None:
    """Go back from a damaged checkpoint to the newest one before it, as `checkpoint.onDamage: UsePrevious` asks.

    None for what is no checkpoint below `uri`, the job's own folder: data, or a checkpoint that the spec names. `uid`
    and `restore` are those of the round that read it. Raises DamagedInput where no other checkpoint is left, or
    StorageError."""
    key = damaged.checkpoint.removeprefix(f"{uri.rstrip('/')}/")
    if key == damaged.checkpoint or (where := CheckpointKey.of(f"{key}/{NAME}")) is None:
        return None
    place, passed_over = where[0], (*restore.damaged, damaged.checkpoint)
    undone = restore.all_undone if place.uid == uid else ()
    previous = go_back(uri, place.uid, *undone, damaged=passed_over)
    if previous is None:
        raise none_left(passed_over) from damaged
    return Rollback(previous.step, restore.skipped, Durable(place.uid, place.round, place.step, damaged.checkpoint))


def usable(durable: Durable, uid: str, restore: Restore) -> Durable | None:
    """Return the checkpoint that `LATEST` names, or the newest one before it that was neither undone nor found damaged;
    None where all were undone. Raises DamagedInput where damage has left none, or StorageError."""
    if not restore.bars(durable, uid):
        return durable
    undone = restore.all_undone if durable.uid == uid else ()
    found = go_back(run_of(durable.uri), durable.uid, *undone, damaged=restore.damaged)
    if found is None and restore.damaged:
        raise none_left(restore.damaged)
    return found


def none_left(damaged: Sequence[str]) -> DamagedInput:
    """The end of a run that damage has left no checkpoint: it must not begin anew by itself."""
    return DamagedInput(
        f"No checkpoint is left to go on from. Damaged: {', '.join(damaged)}. Put one back from a backup, or start a "
        "new run under another checkpoint.uri."
    )


def newest(folder: ObjectPrefix, uid: str, undone: tuple[Undone, ...], damaged: Collection[str] = ()) -> Latest | None:
    """As `LATEST` would name it: of this job, or else of the one that it went on from."""
    _, finished = found(folder.entries(uid))
    ours = sorted(_not_void(finished, undone), key=_age, reverse=True)

    def first(places: Iterable[CheckpointKey]) -> tuple[CheckpointKey, bytes, Manifest] | None:
        whole = (place for place in places if f"{folder.uri}/{place.folder}" not in damaged)
        return next(_readable(folder, whole), None)

    good = first(ours) or first(_before(folder, uid, finished, undone))
    if good is None:
        return None
    place, text, manifest = good
    uri = f"{folder.uri}/{place.folder}"
    durable = Durable(place.uid, place.round, place.step, uri, manifest.complete, manifest.at)
    return Latest(durable, f"{place.folder}/{NAME}", zlib.crc32(text), undone, uid)


def _before(
    folder: ObjectPrefix, uid: str, finished: Iterable[CheckpointKey], undone: Sequence[Undone]
) -> list[CheckpointKey]:
    """The other job's, up to the one that this job went on from; first those that a rollback wants: of steps before
    all that was undone."""
    ours = _readable(folder, sorted(finished, key=_age, reverse=True))
    begun = next((manifest.continued for _, _, manifest in ours), None)
    if begun is None or begun.uid == uid:
        return []
    begin = CheckpointKey(begun.uid, begun.round, begun.step)
    void = next((manifest.undone for _, _, manifest in _readable(folder, [begin])), ())
    _, theirs = found(folder.entries(begin.uid))
    good = [place for place in _not_void(theirs, void) if _age(place) <= _age(begin)]
    return sorted(good, key=lambda place: (all(place.step <= some.step for some in undone), *_age(place)), reverse=True)


def _readable(folder: ObjectPrefix, places: Iterable[CheckpointKey]) -> Iterator[tuple[CheckpointKey, bytes, Manifest]]:
    for place in places:
        text = folder.get(f"{place.folder}/{NAME}")
        if text is None:  # it was deleted just now
            continue
        with contextlib.suppress(InvalidInput):  # damaged, or of a newer version: there are older ones
            yield place, text, parse(text, f"{folder.uri}/{place.folder}")


def _not_void(places: Iterable[CheckpointKey], undone: Sequence[Undone]) -> list[CheckpointKey]:
    return [place for place in places if not any(some.covers(place.round, place.step) for some in undone)]


def _age(place: CheckpointKey) -> tuple[int, int]:
    return place.round, place.step
