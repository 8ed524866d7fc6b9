"""What can be done with checkpoints in storage without a cluster: list, verify, copy, prune. No torch.

What is read to its end is opened by `opened`, by whoever calls: so it stays until it has been read.
`Advance` is told of bytes as they are done, for progress bars.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence

from concertina_protocol import Durable
from concertina_state.checkpoints import manifest as manifests
from concertina_state.checkpoints.latest import LATEST, Latest, read_all_of_latest, read_latest
from concertina_state.checkpoints.manifest import NAME, CheckpointKey, Manifest, to_json
from concertina_state.checkpoints.reader import StoredCheckpoint, StoredShard, opened, resolve
from concertina_state.checkpoints.retention import Keeping, doomed, found, remove, since
from concertina_state.errors import DamagedInput, InvalidInput
from concertina_state.objects.prefix import Changed, ObjectPrefix, StorageError

Advance = Callable[[int], None]
THREADS = 4


def finished(folder: ObjectPrefix) -> tuple[list[Manifest], list[str]]:
    """All finished checkpoints below a run's folder, oldest first; and of those that can't be used, why: a sentence."""
    _, places = found(folder.entries())
    read, problems = [], []
    for place, text in zip(places, folder.get_many([f"{place.folder}/{NAME}" for place in places]), strict=True):
        try:
            read += [manifests.parse(text, f"{folder.uri}/{place.folder}")] if text is not None else []
        except InvalidInput as error:
            problems.append(str(error))
    return sorted(read, key=lambda manifest: (manifest.at, manifest.id.round, manifest.id.step)), sorted(problems)


def named(folder: ObjectPrefix, whole: Sequence[Manifest]) -> tuple[CheckpointKey | None, str]:
    """Which of these finished checkpoints LATEST names; and what is wrong with it: a sentence, or nothing."""
    try:
        latest = read_latest(folder)
    except StorageError as error:
        return None, str(error)
    if latest is None:
        return None, ""
    place = CheckpointKey(latest.uid, latest.round, latest.step)
    if place not in [manifest.place for manifest in whole]:
        return None, f"{folder.uri}/{LATEST} names {place.folder}, which is not there or can't be used."
    return place, ""


def undone(folder: ObjectPrefix, manifests: Sequence[Manifest]) -> set[CheckpointKey]:
    """Which of these a rollback has made void, as far as LATEST can be read."""
    with contextlib.suppress(StorageError):
        if latest := read_all_of_latest(folder):
            places = [manifest.place for manifest in manifests]
            return {place for place in places if latest.voids(place.uid, place.round, place.step)}
    return set()


def instead_of(damaged: InvalidInput) -> str:
    """Name the newest other checkpoint of the run and how to use it, in a sentence with a space before it; empty where
    none can be named. Its bytes are not read: only what goes on from it checks them."""
    uri = damaged.checkpoint if isinstance(damaged, DamagedInput) else ""
    if not uri:
        return ""
    try:
        folder = ObjectPrefix(run_of(uri))
        whole, _ = finished(folder)
        void = undone(folder, whole)
    except StorageError:
        return ""
    others = [each for each in whole if each.place not in void and f"{folder.uri}/{each.place.folder}" != uri]
    if not others:
        return f" {folder.uri} has no other finished checkpoint."
    newest = others[-1]
    return (
        f" The newest other one is of step {newest.id.step}. To go on from it, create the job again with "
        f"checkpoint.resumeFrom: {folder.uri}/{newest.place.folder} and another, empty folder in checkpoint.uri."
    )


def verify(checkpoint: StoredCheckpoint, advance: Advance) -> list[str]:
    """Read everything; what is wrong, a sentence for each file."""
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        problems = list(pool.map(lambda shard: _problem(shard, checkpoint.manifest, advance), checkpoint.shards))
    return [problem for problem in problems if problem]


def _problem(shard: StoredShard, manifest: Manifest, advance: Advance) -> str:
    try:
        value = 0
        for block in shard.blocks():
            value = zlib.crc32(block, value)
            advance(len(block))
        metadata = shard.header.metadata
    except (InvalidInput, StorageError) as error:
        return str(error)
    if value != shard.file.crc32:
        return f"{shard.uri} is damaged: its crc32 is {value:08x} and the manifest says {shard.file.crc32:08x}."
    if (metadata.id, metadata.position, metadata.data) != (manifest.id, manifest.position, manifest.data):
        return f"{shard.uri} belongs to step {metadata.id.step} of round {metadata.id.round}, not to this checkpoint."
    return ""


def copy(source: StoredCheckpoint, target: ObjectPrefix, advance: Advance) -> str:
    """Copy one checkpoint below another run's folder, read it back, and point LATEST there at it where there is none.
    Returns its URI. Raises StorageError, or InvalidInput where the source is damaged or the copy is."""
    manifest = source.manifest
    place = manifest.place
    if source.uri == f"{target.uri}/{place.folder}":
        raise InvalidInput(f"{source.uri} would be copied onto itself: name another folder.")
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda shard: _copy_shard(shard, source.folder, target, place, advance), source.shards))
    text = to_json(manifest)
    target.put(f"{place.folder}/{NAME}", text)
    target.settle([f"{place.folder}/{NAME}"])
    with opened(f"{target.uri}/{place.folder}") as copied:
        problems = verify(copied, advance)
    if problems:
        raise InvalidInput(f"the copy is not what was copied: {problems[0]}")
    if read_latest(target) is None:
        durable = Durable(manifest.uid, manifest.id.round, manifest.id.step, copied.uri, manifest.complete, manifest.at)
        with contextlib.suppress(Changed):  # somebody was quicker
            target.put_if(LATEST, to_json(Latest(durable, f"{place.folder}/{NAME}", zlib.crc32(text))), None)
    return copied.uri


def _copy_shard(
    shard: StoredShard, source: ObjectPrefix, target: ObjectPrefix, place: CheckpointKey, advance: Advance
) -> None:
    def counted() -> Iterator[memoryview]:
        for block in shard.blocks():
            yield block
            advance(len(block))

    sidecar = shard.file.key.removesuffix(".safetensors") + ".json"
    written = [f"{place.folder}/{shard.file.key}"]
    target.put_pieces(written[0], counted(), shard.file.size)
    text = source.get(sidecar)
    if text is not None:
        written.append(f"{place.folder}/{sidecar}")
        target.put(written[1], text)
    target.settle(written)


def to_prune(folder: ObjectPrefix, keep: int, keep_every: int | None) -> list[CheckpointKey]:
    """What `prune` would delete, oldest first; nothing of other jobs that was written since LATEST has moved: one that
    goes on from there is about to finish it. Raises InvalidInput where LATEST names nothing."""
    entries = folder.entries()  # first: with a LATEST that moves meanwhile, less goes
    read = read_all_of_latest(folder)
    latest = read.durable if read else None
    if read is None or latest is None:
        raise InvalidInput(f"{folder.uri} has no {LATEST}: give the folder of a run, as checkpoint.uri names it.")
    newest = CheckpointKey(latest.uid, latest.round, latest.step)
    new = {place for place in since(entries, LATEST) if place.uid != newest.uid}
    places, whole = (some - new for some in found(entries))
    return doomed(places, whole, newest, Keeping(keep, keep_every), read.undid(latest.uid))


def prune(folder: ObjectPrefix, places: list[CheckpointKey]) -> list[CheckpointKey]:
    """Delete these; returns those that stay because somebody reads them."""
    now = max(entry.at for entry in folder.entries().values())
    return [place for place in places if not remove(folder, place, now)]


def run_of(uri: str) -> str:
    """The folder of the run that a checkpoint's own folder is in."""
    return uri.rsplit("/", 3)[0]


def at_step(uri: str, step: int | None) -> StoredCheckpoint:
    """One checkpoint, by its own URI or as the newest of its run's folder; with `step`, the newest of a run's that has
    so many steps and was not undone. Raises InvalidInput where there is none."""
    if step is None:
        return StoredCheckpoint(resolve(uri))
    folder = ObjectPrefix(uri)
    if folder.get(NAME) is not None:
        found = StoredCheckpoint(folder.uri)
        if found.manifest.id.step != step:
            raise InvalidInput(f"{uri} is a checkpoint of step {found.manifest.id.step}: give its run's folder.")
        return found
    whole, _ = finished(folder)
    void = undone(folder, whole)
    good = [manifest for manifest in whole if manifest.place not in void]
    there = [manifest.place for manifest in good if manifest.id.step == step]
    if not there:
        steps = ", ".join(str(each) for each in sorted({manifest.id.step for manifest in good})[-20:]) or "none"
        raise InvalidInput(f"{uri} has no checkpoint of step {step}. The last ones are of: {steps}.")
    return StoredCheckpoint(f"{folder.uri}/{there[-1].folder}")
