"""Operations on checkpoints in storage that need no cluster: list, verify, copy and prune.

A caller that reads a whole checkpoint opens it with `opened`, which prevents its deletion in the meantime. A progress
bar passes a function of type `Advance`, which is called with the number of bytes just processed. The module does not
import torch.
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
    """Return the finished checkpoints in a run's folder, oldest first, and sentences about unusable ones.

    The second result contains a sentence about each checkpoint that can't be used.
    """
    _, keys = found(folder.entries())
    read, problems = [], []
    for key, text in zip(keys, folder.get_many([f"{key.folder}/{NAME}" for key in keys])):
        try:
            read += [manifests.parse(text, f"{folder.uri}/{key.folder}")] if text is not None else []
        except InvalidInput as error:
            problems.append(str(error))
    return sorted(read, key=lambda manifest: (manifest.at, manifest.id.round, manifest.id.step)), sorted(problems)


def named(folder: ObjectPrefix, whole: Sequence[Manifest]) -> tuple[CheckpointKey | None, str]:
    """Return the checkpoint that the object LATEST names, and a sentence about any problem with LATEST.

    Without a problem, the sentence is "". `whole` contains the finished checkpoints. If LATEST does not exist or names
    none of them, the first result is None.
    """
    try:
        latest = read_latest(folder)
    except StorageError as error:
        return None, str(error)
    if latest is None:
        return None, ""
    key = CheckpointKey.named_by(latest)
    if key not in [manifest.place for manifest in whole]:
        return None, f"{folder.uri}/{LATEST} names {key.folder}, which is missing or can't be used."
    return key, ""


def undone(folder: ObjectPrefix, manifests: Sequence[Manifest]) -> set[CheckpointKey]:
    """Return the checkpoints among `manifests` that a rollback has made invalid.

    The object LATEST in the folder lists the rollbacks. If LATEST cannot be read, the result is empty.
    """
    with contextlib.suppress(StorageError):
        if latest := read_all_of_latest(folder):
            keys = [manifest.place for manifest in manifests]
            return {key for key in keys if latest.voids(key.uid, key.round, key.step)}
    return set()


def instead_of(damaged: InvalidInput) -> str:
    """Return a sentence that names the newest other checkpoint of the run and says how to continue from it.

    The result begins with a space. If the run has no other checkpoint, the sentence says that. If the error `damaged`
    is not about a checkpoint, or storage can't be read, the result is "".

    The contents of the other checkpoint are not verified here. The job that continues from it verifies them.
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
        f" The newest other checkpoint is from step {newest.id.step}. To continue from it, create the job "
        f"again with checkpoint.resumeFrom: {folder.uri}/{newest.place.folder} and another, empty folder in "
        "checkpoint.uri."
    )


def verify(checkpoint: StoredCheckpoint, advance: Advance) -> list[str]:
    """Read a whole checkpoint, and return a sentence about each damaged file."""
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
        return f"{shard.uri} is damaged: its crc32 is {value:08x}, but the manifest has {shard.file.crc32:08x}."
    if (metadata.id, metadata.position, metadata.data) != (manifest.id, manifest.position, manifest.data):
        return f"{shard.uri} belongs to step {metadata.id.step} of round {metadata.id.round}, not to this checkpoint."
    return ""


def copy(source: StoredCheckpoint, target: ObjectPrefix, advance: Advance) -> str:
    """Copy a checkpoint into another run's folder, verify the copy, and return its URI.

    If no object LATEST exists in the other folder, this function creates it, so that a job in that folder continues
    from the copy.

    Raises:
        InvalidInput: When the source or the copy is damaged, or the source would be copied onto itself.
        StorageError: When durable storage can't be read or written.
    """
    manifest = source.manifest
    key = manifest.place
    if source.uri == f"{target.uri}/{key.folder}":
        raise InvalidInput(f"{source.uri} is both source and destination: name another folder.")
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda shard: _copy_shard(shard, source.folder, target, key, advance), source.shards))
    text = to_json(manifest)
    target.put(f"{key.folder}/{NAME}", text)
    target.settle([f"{key.folder}/{NAME}"])
    with opened(f"{target.uri}/{key.folder}") as copied:
        problems = verify(copied, advance)
    if problems:
        raise InvalidInput(f"the copy differs from its source: {problems[0]}")
    if read_latest(target) is None:
        durable = Durable(manifest.uid, manifest.id.round, manifest.id.step, copied.uri, manifest.complete, manifest.at)
        with contextlib.suppress(Changed):  # another process has just created LATEST
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

    Checkpoints of another job that are newer than the checkpoint in LATEST are not deleted. The other job may have
    continued from the checkpoint in LATEST, and may be about to finish its own first checkpoint.

    Raises:
        InvalidInput: When LATEST does not exist or names no checkpoint.
    """
    entries = folder.entries()  # listed before LATEST is read: if LATEST moves in between, less is deleted
    read = read_all_of_latest(folder)
    latest = read.durable if read else None
    if read is None or latest is None:
        raise InvalidInput(f"{folder.uri} has no {LATEST}: name the folder of a run, which is its checkpoint.uri.")
    newest = CheckpointKey.named_by(latest)
    new = {key for key in since(entries, LATEST) if key.uid != newest.uid}
    keys, whole = (listed_keys - new for listed_keys in found(entries))
    keeping = Keeping(keep, keep_every, best=CheckpointKey.named_by(latest.best) if latest.best else None)
    return doomed(keys, whole, newest, keeping, read.undid(latest.uid))


def prune(folder: ObjectPrefix, keys: list[CheckpointKey]) -> list[CheckpointKey]:
    """Delete the checkpoints `keys`. Return the checkpoints that were not deleted because they are being read."""
    entries = folder.entries()
    if not entries:
        return []  # another process has deleted the folder's contents
    now = max(entry.at for entry in entries.values())
    return [key for key in keys if not remove(folder, key, now)]


def run_of(uri: str) -> str:
    """Return the URI of a run's folder, given the URI of a checkpoint's folder in it."""
    return uri.rsplit("/", 3)[0]


def at_step(uri: str, step: int | None) -> StoredCheckpoint:
    """Open a checkpoint, given its own URI or the URI of its run's folder.

    In a run's folder, this function opens the newest checkpoint, which the object LATEST names. If `step` is set, it
    opens the newest checkpoint of that step that no rollback has undone.

    Raises:
        InvalidInput: When there is no such checkpoint.
    """
    if step is None:
        return StoredCheckpoint(resolve(uri))
    folder = ObjectPrefix(uri)
    if folder.get(NAME) is not None:
        checkpoint = StoredCheckpoint(folder.uri)
        if checkpoint.manifest.id.step != step:
            raise InvalidInput(
                f"{uri} is a checkpoint of step {checkpoint.manifest.id.step}: name the folder of its run instead."
            )
        return checkpoint
    whole, _ = finished(folder)
    void_keys = undone(folder, whole)
    usable = [manifest for manifest in whole if manifest.place not in void_keys]
    matching_keys = [manifest.place for manifest in usable if manifest.id.step == step]
    if not matching_keys:
        steps = ", ".join(str(number) for number in sorted({manifest.id.step for manifest in usable})[-20:]) or "none"
        raise InvalidInput(f"{uri} has no checkpoint of step {step}. The newest checkpoints are of the steps {steps}.")
    return StoredCheckpoint(f"{folder.uri}/{matching_keys[-1].folder}")
