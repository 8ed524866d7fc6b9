"""Effect of rollbacks on checkpoints in durable storage.

A rollback undoes the checkpoints after a step. Afterwards, `LATEST` names the newest checkpoint that was not undone.
`LATEST` also lists the rollback, because an undone checkpoint may be published after the rollback (decision "LATEST
lists the rollbacks").
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import reduce

from concertina_protocol import Durable, Restore, Rollback, Undone
from concertina_protocol.messages.undone import joined
from concertina_state.checkpoints.best import still_best
from concertina_state.checkpoints.catalogue import run_of
from concertina_state.checkpoints.latest import Latest, change_latest, read_all_of_latest
from concertina_state.checkpoints.manifest import NAME, CheckpointKey, Manifest, parse
from concertina_state.checkpoints.retention import found
from concertina_state.errors import DamagedInput, InvalidInput
from concertina_state.objects.prefix import ObjectPrefix


def undo(folder: ObjectPrefix, uid: str, undone: Undone) -> Durable | None:
    """Apply a rollback to the object `LATEST`, and return the checkpoint that `LATEST` names afterwards.

    If `LATEST` names a checkpoint of this job that the rollback has undone, `LATEST` is changed to name the newest
    remaining checkpoint. `LATEST` also lists the rollback, so that it never names an undone checkpoint later. If
    `LATEST` already names a checkpoint of a later round, nothing is changed. The call may be repeated.

    Raises:
        StorageError: When durable storage can't be read or written.
    """

    def without(latest: Latest | None) -> Latest | None:
        before = latest.undid(uid) if latest else ()
        all_undone = joined(before, undone)
        named = latest.durable if latest else None
        if all_undone == before or (named and named.uid == uid and named.round > undone.round):
            return None
        if latest and named and not (named.uid == uid and undone.covers(named.round, named.step)):
            changed = Latest(named, latest.manifest, latest.crc32, all_undone, uid)
        else:
            changed = newest(folder, uid, all_undone) or Latest(None, "", 0, all_undone, uid)
        if changed.durable is None or named is None or named.best is None:
            return changed
        kept = dataclasses.replace(changed, durable=dataclasses.replace(changed.durable, best=named.best))
        best = still_best(kept, folder)
        return dataclasses.replace(kept, durable=dataclasses.replace(changed.durable, best=best))

    latest_after = change_latest(folder, without)
    return latest_after.durable if latest_after else None


def go_back(uri: str, uid: str, *undone: Undone, damaged: Collection[str] = ()) -> Durable | None:
    """Return the newest checkpoint that no rollback has undone, or None if none is left.

    The checkpoint belongs to the job `uid` or, if this job has none, to the job that it continued. `damaged` contains
    the URIs of checkpoints to skip.

    Raises:
        StorageError: When durable storage can't be read.
    """
    folder = ObjectPrefix(uri)
    latest = read_all_of_latest(folder)
    newest_good = newest(folder, uid, reduce(joined, undone, latest.undid(uid) if latest else ()), damaged)
    return newest_good.durable if newest_good else None


def before_damaged(damaged: DamagedInput, uri: str, uid: str, restore: Restore) -> Rollback | None:
    """Return the rollback from a damaged checkpoint to the newest usable one before it.

    The setting `checkpoint.onDamage: UsePrevious` requests such a rollback. `uid` and `restore` are those of the round
    that read the damaged file.

    The result is None if the damaged file is not part of a checkpoint in the job's own folder `uri`. In that case, the
    file is part of the training data, or of a checkpoint elsewhere that the spec names.

    Raises:
        DamagedInput: When no other checkpoint is left.
        StorageError: When durable storage can't be read.
    """
    key = damaged.checkpoint.removeprefix(f"{uri.rstrip('/')}/")
    if key == damaged.checkpoint or (where := CheckpointKey.of(f"{key}/{NAME}")) is None:
        return None
    checkpoint, passed_over = where[0], (*restore.damaged, damaged.checkpoint)
    undone = restore.all_undone if checkpoint.uid == uid else ()
    previous = go_back(uri, checkpoint.uid, *undone, damaged=passed_over)
    if previous is None:
        error = none_left(passed_over)
        raise error from damaged
    return Rollback(
        previous.step, restore.skipped, Durable(checkpoint.uid, checkpoint.round, checkpoint.step, damaged.checkpoint)
    )


def usable(durable: Durable, uid: str, restore: Restore) -> Durable | None:
    """Return the checkpoint from which the job continues, or None if rollbacks have undone all checkpoints.

    `durable` is the checkpoint that the object LATEST names. If that checkpoint was undone or is damaged, the result is
    the newest usable checkpoint before it.

    Raises:
        DamagedInput: When no usable checkpoint is left, and at least one checkpoint is damaged.
        StorageError: When durable storage can't be read.
    """
    if not restore.bars(durable, uid):
        return durable
    undone = restore.all_undone if durable.uid == uid else ()
    previous = go_back(run_of(durable.uri), durable.uid, *undone, damaged=restore.damaged)
    if previous is None and restore.damaged:
        raise none_left(restore.damaged)
    return previous


def none_left(damaged: Sequence[str]) -> DamagedInput:
    """Return the error for a run whose checkpoints are all damaged or undone.

    The error ends the run. Only a user may decide to start it again from step 0.
    """
    return DamagedInput(
        f"No checkpoint is left to continue from. Damaged: {', '.join(damaged)}. Restore one from a backup, "
        "or start a new run under another checkpoint.uri."
    )


def newest(folder: ObjectPrefix, uid: str, undone: tuple[Undone, ...], damaged: Collection[str] = ()) -> Latest | None:
    """Return contents of `LATEST` that name the newest usable checkpoint, or None if there is no usable checkpoint.

    The checkpoint is of the job `uid` or, if this job has none, of the job that it continued.
    """
    _, finished = found(folder.entries(uid))
    ours = sorted(_not_void(finished, undone), key=_age, reverse=True)

    def first(keys: Iterable[CheckpointKey]) -> tuple[CheckpointKey, bytes, Manifest] | None:
        whole = (key for key in keys if f"{folder.uri}/{key.folder}" not in damaged)
        return next(_readable(folder, whole), None)

    newest_good = first(ours) or first(_before(folder, uid, finished, undone))
    if newest_good is None:
        return None
    key, text, manifest = newest_good
    uri = f"{folder.uri}/{key.folder}"
    durable = Durable(key.uid, key.round, key.step, uri, manifest.complete, manifest.at)
    return Latest(durable, f"{key.folder}/{NAME}", zlib.crc32(text), undone, uid)


def _before(
    folder: ObjectPrefix, uid: str, finished: Iterable[CheckpointKey], undone: Sequence[Undone]
) -> list[CheckpointKey]:
    """Return checkpoints of the earlier job that the job `uid` continued, in order of preference.

    The result contains the checkpoint from which the job `uid` continued, and older ones. A rollback to a step makes
    all later steps suspect. The checkpoints that are not later than the step of any rollback in `undone` therefore come
    first, newest first. All other checkpoints follow, also newest first.
    """
    ours = _readable(folder, sorted(finished, key=_age, reverse=True))
    continued = next((manifest.continued for _, _, manifest in ours), None)
    if continued is None or continued.uid == uid:
        return []
    begin = CheckpointKey.named_by(continued)
    other_undone = next((manifest.undone for _, _, manifest in _readable(folder, [begin])), ())
    _, other_finished = found(folder.entries(begin.uid))
    good_keys = [key for key in _not_void(other_finished, other_undone) if _age(key) <= _age(begin)]
    return sorted(
        good_keys, key=lambda key: (all(key.step <= rollback.step for rollback in undone), *_age(key)), reverse=True
    )


def _readable(folder: ObjectPrefix, keys: Iterable[CheckpointKey]) -> Iterator[tuple[CheckpointKey, bytes, Manifest]]:
    for key in keys:
        text = folder.get(f"{key.folder}/{NAME}")
        if text is None:  # the checkpoint has just been deleted
            continue
        with contextlib.suppress(InvalidInput):  # damaged or of a newer version: try an older checkpoint
            yield key, text, parse(text, f"{folder.uri}/{key.folder}")


def _not_void(keys: Iterable[CheckpointKey], undone: Sequence[Undone]) -> list[CheckpointKey]:
    return [key for key in keys if not any(rollback.covers(key.round, key.step) for rollback in undone)]


def _age(key: CheckpointKey) -> tuple[int, int]:
    return key.round, key.step
