"""Operations on checkpoints in storage without a cluster: list, verify, copy, prune. No torch.

Callers open a checkpoint that they read to its end with `opened`, so that it stays until it has been read. `Advance`
receives the number of bytes as they are processed, for progress bars.
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
    """Return the finished checkpoints below a run's folder, oldest first, and a sentence for each unusable one."""
    _, keys = found(folder.entries())
    read, problems = [], []
    for key, text in zip(keys, folder.get_many([f"{key.folder}/{NAME}" for key in keys])):
        try:
            read += [manifests.parse(text, f"{folder.uri}/{key.folder}")] if text is not None else []
        except InvalidInput as error:
            problems.append(str(error))
    return sorted(read, key=lambda manifest: (manifest.at, manifest.id.round, manifest.id.step)), sorted(problems)


def named(folder: ObjectPrefix, whole: Sequence[Manifest]) -> tuple[CheckpointKey | None, str]:
    """Return which of these finished checkpoints LATEST names, and a sentence about what is wrong with it, or ""."""
    try:
        latest = read_latest(folder)
    except StorageError as error:
        return None, str(error)
    if latest is None:
        return None, ""
    key = CheckpointKey(latest.uid, latest.round, latest.step)
    if key not in [manifest.place for manifest in whole]:
        return None, f"{folder.uri}/{LATEST} names {key.folder}, which is not there or can't be used."
    return key, ""


def undone(folder: ObjectPrefix, manifests: Sequence[Manifest]) -> set[CheckpointKey]:
    """Return those of the checkpoints that a rollback has made void, as far as LATEST can be read."""
    with contextlib.suppress(StorageError):
        if latest := read_all_of_latest(folder):
            keys = [manifest.place for manifest in manifests]
            return {key for key in keys if latest.voids(key.uid, key.round, key.step)}
    return set()


def instead_of(damaged: InvalidInput) -> str:
    """Return a sentence that names the newest other checkpoint of the run and says how to use it.

    The sentence begins with a space. It is empty if no checkpoint can be named. The bytes of that checkpoint are not
    read: only a job that continues from it checks them.
    """
    uri = damaged.checkpoint if isinstance(damaged, DamagedInput) else ""
    if not uri:
        return ""
    try:
        folder = ObjectPrefix(run_of(uri))
        whole, _ = finished(folder)
        void_keys = undone(folder, whole)
    except StorageError:
        return ""
    others = [
        manifest
        for manifest in whole
        if manifest.place not in void_keys and f"{folder.uri}/{manifest.place.folder}" != uri
    ]
    if not others:
        return f" {folder.uri} has no other finished checkpoint."
    newest = others[-1]
    return (
        f" The newest other one is of step {newest.id.step}. To continue from it, create the job again with "
        f"checkpoint.resumeFrom: {folder.uri}/{newest.place.folder} and another, empty folder in checkpoint.uri."
    )


def verify(checkpoint: StoredCheckpoint, advance: Advance) -> list[str]:
    """Read a checkpoint completely, and return a sentence for each file that is damaged."""
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
    """Copy one checkpoint below another run's folder, read it back, and return its URI.

    If LATEST does not exist there, it is created and names the copy.

    Raises:
        InvalidInput: When the source or the copy is damaged, or the source would be copied onto itself.
        StorageError: When durable storage can't be read or written.
    """
    manifest = source.manifest
    key = manifest.place
    if source.uri == f"{target.uri}/{key.folder}":
        raise InvalidInput(f"{source.uri} would be copied onto itself: name another folder.")
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda shard: _copy_shard(shard, source.folder, target, key, advance), source.shards))
    text = to_json(manifest)
    target.put(f"{key.folder}/{NAME}", text)
    target.settle([f"{key.folder}/{NAME}"])
    with opened(f"{target.uri}/{key.folder}") as copied:
        problems = verify(copied, advance)
    if problems:
        raise InvalidInput(f"the copy is not what was copied: {problems[0]}")
    if read_latest(target) is None:
        durable = Durable(manifest.uid, manifest.id.round, manifest.id.step, copied.uri, manifest.complete, manifest.at)
        with contextlib.suppress(Changed):  # another process created it meanwhile
            target.put_if(LATEST, to_json(Latest(durable, f"{key.folder}/{NAME}", zlib.crc32(text))), None)
    return copied.uri


def _copy_shard(
    shard: StoredShard, source: ObjectPrefix, target: ObjectPrefix, key: CheckpointKey, advance: Advance
) -> None:
    def counted() -> Iterator[memoryview]:
        for block in shard.blocks():
            yield block
            advance(len(block))

    sidecar = shard.file.key.removesuffix(".safetensors") + ".json"
    written = [f"{key.folder}/{shard.file.key}"]
    target.put_pieces(written[0], counted(), shard.file.size)
    text = source.get(sidecar)
    if text is not None:
        written.append(f"{key.folder}/{sidecar}")
        target.put(written[1], text)
    target.settle(written)


def to_prune(folder: ObjectPrefix, keep: int, keep_every: int | None) -> list[CheckpointKey]:
    """Return the checkpoints that `prune` would delete, oldest first.

    Checkpoints of other jobs that were written since LATEST moved are left out: a job that continues from it may be
    about to finish one.

    Raises:
        InvalidInput: When LATEST names nothing.
    """
    entries = folder.entries()  # before LATEST is read: if it moves meanwhile, less is deleted
    read = read_all_of_latest(folder)
    latest = read.durable if read else None
    if read is None or latest is None:
        raise InvalidInput(f"{folder.uri} has no {LATEST}: give the folder of a run, as checkpoint.uri names it.")
    newest = CheckpointKey(latest.uid, latest.round, latest.step)
    new = {key for key in since(entries, LATEST) if key.uid != newest.uid}
    keys, whole = (listed_keys - new for listed_keys in found(entries))
    return doomed(keys, whole, newest, Keeping(keep, keep_every), read.undid(latest.uid))


def prune(folder: ObjectPrefix, keys: list[CheckpointKey]) -> list[CheckpointKey]:
    """Delete these checkpoints, and return those that stay because they are being read."""
    entries = folder.entries()
    if not entries:
        return []  # another process has deleted all of them
    now = max(entry.at for entry in entries.values())
    return [key for key in keys if not remove(folder, key, now)]


def run_of(uri: str) -> str:
    """Return the folder of the run that a checkpoint's own folder is in."""
    return uri.rsplit("/", 3)[0]


def at_step(uri: str, step: int | None) -> StoredCheckpoint:
    """Open one checkpoint, by its own URI or as the newest one in its run's folder.

    With `step`, open the newest checkpoint of the run that has this many steps and was not undone.

    Raises:
        InvalidInput: When there is no such checkpoint.
    """
    if step is None:
        return StoredCheckpoint(resolve(uri))
    folder = ObjectPrefix(uri)
    if folder.get(NAME) is not None:
        checkpoint = StoredCheckpoint(folder.uri)
        if checkpoint.manifest.id.step != step:
            raise InvalidInput(f"{uri} is a checkpoint of step {checkpoint.manifest.id.step}: give its run's folder.")
        return checkpoint
    whole, _ = finished(folder)
    void_keys = undone(folder, whole)
    usable = [manifest for manifest in whole if manifest.place not in void_keys]
    matching_keys = [manifest.place for manifest in usable if manifest.id.step == step]
    if not matching_keys:
        steps = ", ".join(str(number) for number in sorted({manifest.id.step for manifest in usable})[-20:]) or "none"
        raise InvalidInput(f"{uri} has no checkpoint of step {step}. The last ones are of: {steps}.")
    return StoredCheckpoint(f"{folder.uri}/{matching_keys[-1].folder}")
