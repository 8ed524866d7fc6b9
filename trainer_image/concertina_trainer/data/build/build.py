"""Building of a data set by one or several processes or machines. An interrupted build can be continued.

The result has the same bytes for any number of processes and machines. An input of the build is a group of pieces of
source files. Only the sizes of the source files determine the inputs, and every process converts an input into the same
shards (decision "Each part of the sources becomes one shard"). For each finished input, the build writes a record
beside the shards. The process that sees the records of all inputs writes the manifest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from concertina_data.data_manifest import (
    FORMAT,
    NAME,
    VALIDATION,
    ChatFacts,
    DataManifest,
    TokenizerFacts,
    TokenShard,
)
from concertina_protocol.codec.typed_json import from_json
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.data.build.chat_counts import NO_CHATS, ChatCounts
from concertina_trainer.data.build.duplicates import ROW, chats_of, first_occurrences, removed, rows_of
from concertina_trainer.data.build.find import find_evaluation
from concertina_trainer.data.build.recipe import Duplicates, Recipe
from concertina_trainer.data.build.sources import DataSource, Piece, check, cut
from concertina_trainer.data.build.write import ShardInput, Written, write
from concertina_trainer.data.defaults import CHAT_TEMPLATE, SHARD_BYTES
from concertina_trainer.data.packing import pack

_FILES_AT_ONCE = 16
"""Number of files that are read at the same time."""
MADE_BY = "made-by"
"""Name of the object with a digest of the build's sources and options."""


@dataclasses.dataclass(frozen=True)
class BuildProgress:
    """Progress of a build."""

    done: int
    """Approximate size in bytes of the text that has been processed."""
    total: int
    manifest: DataManifest | None = None
    """Manifest of the finished data set, in the last report of the process that writes it."""
    overlap: dict[str, object] | None = None
    """Counts of the overlap with evaluation files, in the last report, or None if they were not requested."""
    duplicates: int | None = None
    """Number of documents that repeat an earlier document, or None if it was not requested."""


def build(
    sources: Sequence[DataSource | Path],
    out: str,
    shard_bytes: int = SHARD_BYTES,
    recipe: Recipe = Recipe(),  # noqa: B008 - it is immutable
    processes: int = 1,
    share: tuple[int, int] = (0, 1),
    most_overlapping: int | None = None,
) -> Iterator[BuildProgress]:
    """Build a data set in the folder `out`, which is a URI or a path, and yield the progress.

    If an earlier build of the same data was interrupted, this build continues it. All tokens of a document are in the
    same shard. `share` is (i, n) if n machines build together, and this one is machine i, counting from 0.
    `most_overlapping` is the maximum number of training documents that share an n-gram with the evaluation files.

    Raises:
        InvalidInput: When the sources can't be used, `out` contains other data, or more than `most_overlapping`
            documents overlap.
        StorageError: When durable storage can't be read or written.
    """
    uri = out if "://" in out else str(Path(out).resolve())
    inputs = plan(
        [source if isinstance(source, DataSource) else _source(source) for source in sources], shard_bytes, recipe
    )
    own_inputs = inputs[share[0] :: share[1]]
    _check_heads(own_inputs)
    folder = ObjectPrefix(uri, create=True)
    key = _key(inputs, shard_bytes, recipe)
    _claim(folder, key)
    records = _records(key)
    recorded = folder.list(records)
    missing = [shard for shard in own_inputs if _record(records, shard.index) not in recorded]
    total = sum(shard.size for shard in own_inputs)
    done = total - sum(shard.size for shard in missing)
    yield BuildProgress(done, total)
    writing = functools.partial(_write, uri=uri, key=key, recipe=recipe, shard_bytes=shard_bytes)
    for shard in _written(missing, writing, processes):
        done += shard.size
        yield BuildProgress(done, total)
    finished = _finish(folder, key, len(inputs), recipe, most_overlapping)
    if finished is not None:
        yield BuildProgress(total, total, *finished)


def plan(sources: Sequence[DataSource], shard_bytes: int, recipe: Recipe) -> list[ShardInput]:
    """Return the inputs of a build, each of which becomes about one shard.

    An input consists of consecutive pieces of the sources, with about `shard_bytes` of text.
    """
    inputs: list[ShardInput] = []
    group: list[Piece] = []
    size = 0
    for piece in (piece for source in sources for piece in cut(source, shard_bytes, recipe.columns)):
        if group and size + piece.size > shard_bytes:
            inputs.append(ShardInput(len(inputs), tuple(group), size))
            group, size = [], 0
        group.append(piece)
        size += piece.size
    return [*inputs, ShardInput(len(inputs), tuple(group), size)] if group else inputs


def _source(path: Path) -> DataSource:
    status = path.stat()
    return DataSource(str(path), status.st_size, status.st_mtime_ns)


def _check_heads(inputs: Sequence[ShardInput]) -> None:
    """Check the first bytes of source files before any work is done.

    If several machines share a build, each machine checks only the sources that begin in its own inputs.
    """
    sources = [piece.source for shard in inputs for piece in shard.pieces if not piece.begin]
    with concurrent.futures.ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        for _ in pool.map(check, sources):
            pass


def _key(inputs: Sequence[ShardInput], shard_bytes: int, recipe: Recipe) -> str:
    """Return a digest of the inputs and options of a build.

    A build can continue another only if their digests are equal.
    """
    against = find_evaluation(recipe.against) if recipe.against else []
    options, template = dataclasses.asdict(recipe), recipe.chat_template()
    options["template"] = template and template.digest
    content = [
        options, recipe.load_tokenizer().digest, shard_bytes,
        [dataclasses.asdict(source) for source in against], [dataclasses.asdict(shard) for shard in inputs],
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _claim(folder: ObjectPrefix, key: str) -> None:
    """Register this build as the only one that writes to the folder.

    If another unfinished build was writing to the folder, that build fails at its next shard, and its records are
    deleted. A finished data set of another build is not changed, because jobs may be reading it (decision "No other
    build overwrites finished data").

    Raises:
        InvalidInput: When the folder has a data set from other sources or options.
    """
    claimed_key = folder.get(MADE_BY)
    if claimed_key == key.encode():
        return
    manifest = folder.get(NAME)
    if manifest is not None:
        raise InvalidInput(
            f"{folder.uri} already contains data that were built from other sources or with other options "
            "(`concertina data show` describes them): build into another folder, or delete the data first."
        )
    # The shards of the other build are not deleted: this build's have the same names, and other machines may have
    # written some of them just now.
    own = (f"{_records(key)}/", f"{_records(key)}-digests/")
    folder.delete([name for name in folder.list("building") if not name.startswith(own)])
    folder.put(MADE_BY, key.encode())


def _check_claim(folder: ObjectPrefix, key: str) -> None:
    if folder.get(MADE_BY) != key.encode():
        raise InvalidInput(
            f"this build ends because another build into {folder.uri} has started with other sources or "
            "options: give each build its own folder."
        )


def _records(key: str) -> str:
    return f"building/{key}"


def _record(records: str, index: int) -> str:
    return f"{records}/part-{index:06}.json"


def _digests(records: str, index: int) -> tuple[str, str]:
    """Return the names of two objects: rows of an input's training documents, and of its validation documents."""
    return f"{records}-digests/part-{index:06}", f"{records}-digests/aside-{index:06}"


def _write(shard: ShardInput, uri: str, key: str, recipe: Recipe, shard_bytes: int) -> ShardInput:
    """Write the shards of one input, and then a record that this input is finished.

    An input is a group of pieces of source files. Any process can call this function.
    """
    folder = ObjectPrefix(uri)
    check_claim = functools.partial(_check_claim, folder, key)
    written, rows = write(shard, uri, VALIDATION, recipe, shard_bytes, check_claim)
    check_claim()
    if recipe.duplicates is not Duplicates.kept:
        for name, content in zip(_digests(_records(key), shard.index), rows, strict=True):
            folder.put(name, content)
    folder.put(_record(_records(key), shard.index), json.dumps(dataclasses.asdict(written)).encode())
    return shard


def _written(
    inputs: Sequence[ShardInput], writing: functools.partial[ShardInput], processes: int
) -> Iterator[ShardInput]:
    """Call `writing` for all inputs, in several processes, and yield each input when its shards are written.

    New processes are spawned rather than forked, because the store's client has threads, which do not survive a fork.

    Raises:
        InvalidInput: When a process was killed.
    """
    if processes <= 1 or len(inputs) <= 1:
        yield from map(writing, inputs)
        return
    context = multiprocessing.get_context("spawn")
    count = min(processes, len(inputs))
    with concurrent.futures.ProcessPoolExecutor(count, context, initializer=_end_with_parent) as pool:
        futures = [pool.submit(writing, shard) for shard in inputs]
        try:
            for future in concurrent.futures.as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise InvalidInput(
                "a process that writes shards was killed, possibly because memory ran out: run the same "
                "command again with fewer --processes. Finished shards are kept."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _finish(
    folder: ObjectPrefix, key: str, count: int, recipe: Recipe, most_overlapping: int | None
) -> tuple[DataManifest, dict[str, object] | None, int | None] | None:
    """Write the manifests if all inputs of the build are finished.

    Return the training manifest, the counts of overlaps with evaluation files, and the number of duplicates, or None if
    some input is not finished. Several processes may call this function at the same time, because they write the same
    contents.

    Raises:
        InvalidInput: When there is no text to train on, another build has begun, or too many documents overlap.
    """
    _check_claim(folder, key)
    records = _records(key)
    if len(folder.list(records)) < count:
        return None
    texts = [folder.get(_record(records, index)) for index in range(count)]
    if None in texts:
        return None  # another process has finished the build and is deleting the records
    written = [_read(folder, _record(records, index), text) for index, text in enumerate(texts) if text is not None]
    loaded = recipe.load_tokenizer()
    facts = TokenizerFacts(loaded.name, loaded.digest, loaded.separator)
    template = recipe.chat_template()
    digest, fields = template.digest if template else "", recipe.fields()

    def manifest_of(shards: Sequence[TokenShard], counts: ChatCounts) -> DataManifest:
        length = recipe.chats.length if recipe.chats else None
        chats = None if length is None else ChatFacts(length, digest, *dataclasses.astuple(counts))
        return DataManifest(FORMAT, loaded.vocab_size, facts, fields, tuple(shards), chats)

    result = _without_duplicates(folder, records, written, recipe)
    if result is None:
        return None
    manifest = manifest_of(result.training, result.training_chats)
    aside = manifest_of(result.validation, result.validation_chats)
    if not manifest.tokens:
        raise InvalidInput(f"there is no text to train on: all {aside.documents:,} documents are empty or set aside.")
    overlap = None
    if recipe.against:
        from concertina_trainer.data.build.overlap import report

        overlap = report(recipe, [part.overlap for part in written], result.overlapping)
        _check_claim(folder, key)  # checked again, because the report takes long
        folder.put("overlap.json", json.dumps(overlap, indent=1).encode())
        if most_overlapping is not None and result.overlapping > most_overlapping:
            raise InvalidInput(
                f"{result.overlapping:,} training documents share {recipe.ngram} consecutive words with the evaluation "
                f"data, and --most-overlapping is {most_overlapping:,}: {folder.uri}/overlap.json has examples. Remove "
                "these documents from the sources and build into another folder, or give a higher --most-overlapping."
            )
    if loaded.file:
        folder.put("tokenizer.json", loaded.file)
    if template is not None:
        folder.put(CHAT_TEMPLATE, template.file)
    if recipe.chats is not None:
        _pack(folder, manifest, recipe.chats.length)
    if aside.shards:
        validation = ObjectPrefix(f"{folder.uri}/{VALIDATION}")
        if recipe.chats is not None:
            _pack(validation, aside, recipe.chats.length)
        validation.put(NAME, aside.to_json())
    folder.put(NAME, manifest.to_json())
    folder.delete([_record(records, index) for index in range(count)])
    folder.delete([*folder.list(f"{records}-digests"), *result.replaced])
    if "://" not in folder.uri:
        _sweep(Path(folder.uri), records)
    return manifest, overlap, result.duplicates


@dataclasses.dataclass(frozen=True)
class _Result:
    """Shards of a finished build, and the counts of their documents."""

    training: Sequence[TokenShard]
    validation: Sequence[TokenShard]
    training_chats: ChatCounts
    validation_chats: ChatCounts
    overlapping: int
    """Number of training documents that share an n-gram with the evaluation data."""
    duplicates: int | None = None
    """Number of documents that repeat an earlier document, or None if they were not counted."""
    replaced: Sequence[str] = ()
    """Names of the files of shards that were replaced by other shards, because duplicates were removed."""


def _without_duplicates(
    folder: ObjectPrefix, records: str, written: Sequence[Written], recipe: Recipe
) -> _Result | None:
    """Count the duplicates, and remove them if the recipe says so.

    A validation document that equals a training document is a duplicate too. This can't happen with text, because equal
    texts are either all training data or all validation data. It can happen with chats, because different lines of JSON
    can become equal chats.

    Return None if another process has just finished the build.

    Raises:
        InvalidInput: When the records of documents are damaged.
    """
    shards = [shard for part in written for shard in part.training]
    shards_aside = [shard for part in written for shard in part.validation]
    chats = sum((part.training_chats for part in written), start=NO_CHATS)
    chats_aside = sum((part.validation_chats for part in written), start=NO_CHATS)
    whole = _Result(shards, shards_aside, chats, chats_aside, sum(part.overlap.documents for part in written))
    if recipe.duplicates is Duplicates.kept:
        return whole
    names = [_digests(records, index) for index in range(len(written))]
    recorded = [folder.get(name) for kind in range(2) for name in (pair[kind] for pair in names)]
    if None in recorded:
        return None  # another process has finished the build, and deletes the rows
    whole_rows = b"".join(part for part in recorded if part is not None)
    recorded.clear()  # the rows of all documents may be many gigabytes
    count = sum(shard.documents for shard in shards)
    if len(whole_rows) != ROW.itemsize * (count + sum(shard.documents for shard in shards_aside)):
        raise InvalidInput(
            f"the rows of documents in {folder.uri}/building can't be read (a power failure may have cut them off): "
            "delete this folder, and run the same command again."
        )
    rows = rows_of(whole_rows)
    first = first_occurrences(rows)
    whole = dataclasses.replace(whole, duplicates=int((~first).sum()))
    if recipe.duplicates is Duplicates.counted:
        return whole
    element_bytes = sum(field.bytes for field in recipe.fields())
    unique = removed(folder, shards, rows[:count], first[:count], element_bytes)
    validation = ObjectPrefix(f"{folder.uri}/{VALIDATION}", create=True)
    unique_aside = removed(validation, shards_aside, rows[count:], first[count:], element_bytes)
    if unique is None or unique_aside is None:
        return None
    kept, kept_aside = rows[:count][first[:count]], rows[count:][first[count:]]
    return dataclasses.replace(
        whole,
        training=unique,
        validation=unique_aside,
        # dropped chats have no rows
        training_chats=dataclasses.replace(chats_of(kept), dropped=chats.dropped),
        validation_chats=dataclasses.replace(chats_of(kept_aside), dropped=chats_aside.dropped),
        overlapping=int(kept["overlaps"].sum()),
        replaced=[
            f"{prefix}{name}"
            for prefix, before, after in (("", shards, unique), (f"{VALIDATION}/", shards_aside, unique_aside))
            for shard in set(before) - set(after)
            for name in (shard.file, shard.documents_file)
        ],
    )


def _pack(folder: ObjectPrefix, manifest: DataManifest, length: int) -> None:
    for _ in pack(folder, manifest, length, _FILES_AT_ONCE):
        pass


def _read(folder: ObjectPrefix, name: str, text: bytes) -> Written:
    try:
        return from_json(Written, json.loads(text))
    except ValueError as error:
        folder.delete([name])
        raise InvalidInput(
            f"{folder.uri}/{name} can't be read (a power failure may have cut it off) and was deleted: run "
            "the same command again to write it again."
        ) from error


def _sweep(out: Path, records: str) -> None:
    """Delete empty folders, and drafts (`name#1`) that killed processes of the build have left."""
    for draft in (*out.glob("shard-*#*"), *out.glob(f"{VALIDATION}/shard-*#*"), *out.glob(f"{records}/*#*")):
        draft.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the folder has records of another build
        for folder in (f"{records}-digests", records):
            if (out / folder).is_dir():
                (out / folder).rmdir()
        (out / records).parent.rmdir()
