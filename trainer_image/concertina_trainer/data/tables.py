"""Shards of a data set from pyarrow tables, for engines such as Ray Data that prepare data on many machines.

Each worker of the engine calls `write_table` for its tables. At the end, one process calls `write_manifest` with all
rows that these calls returned. The name of a shard is a digest of its documents, so an engine may run a task again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from concertina_data.data_manifest import FORMAT, NAME, DataManifest, TokenizerFacts, TokenShard
from concertina_data.files import documents_file, tokens_file
from concertina_protocol.codec.typed_json import from_json
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.data.build.build import MADE_BY
from concertina_trainer.data.build.draft import Draft
from concertina_trainer.data.build.recipe import Recipe
from concertina_trainer.data.build.sources import rows
from concertina_trainer.data.build.typed import elements_of
from concertina_trainer.data.defaults import SHARD_BYTES

if TYPE_CHECKING:
    import pyarrow

_BATCH = 256
"""Number of documents to tokenize at once."""
_RECIPE = "recipe"
"""Name of the column with the options of the recipe, as JSON.

All rows of a data set must have the same value.
"""


def write_table(
    table: pyarrow.Table, out: str, recipe: Recipe = Recipe(), shard_bytes: int = SHARD_BYTES  # noqa: B008 - immutable
) -> pyarrow.Table:  # fmt: skip
    """Write the documents of a table as shards of the data set at `out`.

    Return a table with a row for each shard, for `write_manifest`. Each row of `table` is a document, and rows without
    elements are left out. This function uses only the tokenizer, the tokenizer's separator, the column and the typed
    fields of `recipe`.

    Args:
        table: Documents, with the columns of the recipe.
        out: Folder of the data set: a path that all workers share, or a URI of a store.
        recipe: How rows become documents.
        shard_bytes: Size in bytes of the documents in a shard. A larger table becomes several shards.

    Raises:
        InvalidInput: When a row can't be used, `out` has an unfinished build of `concertina data build`, or the recipe
            has options that only that command supports.
        StorageError: When durable storage can't be written.
    """
    import pyarrow

    _check(recipe)
    folder = ObjectPrefix(out, create=True)
    _check_unclaimed(folder)
    element_bytes, options = sum(field.bytes for field in recipe.fields()), json.dumps(_options(recipe))
    shards = [
        {**dataclasses.asdict(shard), _RECIPE: options}
        for draft in _drafts(_documents(table, recipe), shard_bytes)
        for shard in draft.put(folder, _name(draft), element_bytes)
    ]
    return pyarrow.Table.from_pylist(shards, _schema())


def write_manifest(shards: Iterable[Mapping[str, Any]], out: str, recipe: Recipe = Recipe()) -> DataManifest:  # noqa: B008
    """Write the manifest of a data set, after all of its shards have been written.

    The order of the shards depends only on their content, and not on the order in which an engine returns rows. If
    several shards are equal, one of them is kept, because an engine may repeat a task and return the task's rows twice.

    Args:
        shards: Rows of all tables that `write_table` returned, such as `table.to_pylist()` or Ray's `take_all()`.
        out: Folder of the data set.
        recipe: The recipe of `write_table`.

    Raises:
        InvalidInput: When there are no shards, when a shard is missing or was written with another recipe, or when
            `out` contains other data or an unfinished build of `concertina data build`.
        StorageError: When durable storage can't be read or written.
    """
    _check(recipe)
    folder, tokenizer = ObjectPrefix(out), recipe.load_tokenizer()
    _check_unclaimed(folder)
    options = _options(recipe)
    by_content = {(shard.sha256, shard.documents_sha256): shard for shard in (_shard(row, options) for row in shards)}
    found = [shard for _, shard in sorted(by_content.items())]
    if not found:
        raise InvalidInput(f"there is nothing to train on: no document was written to {out}.")
    facts = TokenizerFacts(tokenizer.name, tokenizer.digest, tokenizer.separator)
    manifest = DataManifest(FORMAT, tokenizer.vocab_size, facts, recipe.fields(), tuple(found))
    sizes = folder.list("")
    for file in (file for shard in found for file in (tokens_file(shard), documents_file(shard))):
        if sizes.get(file.file) != file.size:
            raise file.missing(folder.uri) if file.file not in sizes else file.damaged(folder.uri, sizes[file.file])
    if folder.get(NAME) not in (None, manifest.to_json()):
        raise InvalidInput(
            f"{folder.uri} already contains other data (`concertina data show` describes them): write into another "
            "folder, or delete the data first."
        )
    if tokenizer.file:
        folder.put("tokenizer.json", tokenizer.file)
    folder.put(NAME, manifest.to_json())
    return manifest


def _check(recipe: Recipe) -> None:
    """Check that the recipe has no option that `write_table` would ignore.

    Raises:
        InvalidInput: When the recipe has such an option.
    """
    read = {name: getattr(recipe, name) for name in ("tokenizer", "separator", "split_pattern", "column", "typed")}
    if recipe != Recipe(**read):
        raise InvalidInput(
            "write_table supports no validation, duplicates, against and chats: let the engine choose the documents, "
            "or use `concertina data build`."
        )


def _check_unclaimed(folder: ObjectPrefix) -> None:
    """Check that no unfinished build uses the folder, because that build would replace the manifest.

    Raises:
        InvalidInput: When a build of `concertina data build` has begun and is not finished.
    """
    if folder.get(MADE_BY) is not None and folder.get(NAME) is None:
        raise InvalidInput(
            f"{folder.uri} has an unfinished build of `concertina data build`: write into another folder, or delete "
            "this one first."
        )


def _documents(table: pyarrow.Table, recipe: Recipe) -> Iterator[tuple[bytes, int]]:
    """Yield the content of each document, and the size of its text in bytes. The size is 0 if it is not text.

    Raises:
        InvalidInput: When a row can't be used.
    """
    first, encode = 0, recipe.load_tokenizer().encode
    for batch in table.to_batches(_BATCH):
        records = rows(batch, recipe.columns, "the table", first)
        if not set(recipe.columns) <= set(batch.schema.names):
            raise InvalidInput(
                f"the table has no {', '.join(sorted({*recipe.columns} - {*batch.schema.names}))}, but "
                f"{', '.join(batch.schema.names)[:300]}: name its columns in the recipe."
            )
        if recipe.typed is not None:
            yield from ((content, 0) for record in records if (content := elements_of(record, recipe.typed)))
        else:
            texts = [text for record in records if (text := record.text(recipe.column))]
            yield from zip(encode(texts), map(len, texts), strict=True)
        first += batch.num_rows


def _drafts(documents: Iterator[tuple[bytes, int]], shard_bytes: int) -> Iterator[Draft]:
    draft, size = Draft(), 0
    for document, text_bytes in documents:
        if size >= shard_bytes:
            yield draft
            draft, size = Draft(), 0
        draft.documents.append(document)
        draft.text_bytes += text_bytes
        size += len(document)
    yield draft


def _name(draft: Draft) -> str:
    digest = hashlib.sha256()
    for document in draft.documents:
        digest.update(len(document).to_bytes(8, "little") + document)
    return f"shard-{digest.hexdigest()[:32]}"


def _options(recipe: Recipe) -> dict[str, object]:
    """Return the options that determine the documents' content, keyed by their names in error messages."""
    tokenizer = recipe.load_tokenizer()
    return {
        "fields": [f"{field.name}={field.type}{f'x{field.width}' if field.width else ''}" for field in recipe.fields()],
        "columns": list(recipe.columns),
        "vocabulary size": tokenizer.vocab_size,
        "tokenizer": tokenizer.digest,
        "separator": tokenizer.separator,
        "split pattern": recipe.split_pattern,
    }


def _schema() -> pyarrow.Schema:
    import pyarrow

    types = {int: pyarrow.int64(), str: pyarrow.string()}
    names = {"tokens", "size", "crc32", "documents", "text_bytes"}
    columns = [field.name for field in dataclasses.fields(TokenShard)]
    return pyarrow.schema([(name, types[int if name in names else str]) for name in (*columns, _RECIPE)])


def _shard(row: Mapping[str, Any], options: Mapping[str, object]) -> TokenShard:
    """Return the shard that a row of `write_table` describes.

    Raises:
        InvalidInput: When `write_table` has not made the row, or has used another recipe.
    """
    values = dict(row)
    try:
        written = dict(json.loads(str(values.pop(_RECIPE, "{}"))))
        shard = from_json(TokenShard, values)
    except (ValueError, TypeError) as error:
        raise InvalidInput(
            f"a row does not describe a shard ({error}): pass the rows that write_table returns."
        ) from error
    for name, value in options.items():
        if written.get(name) != value:
            raise InvalidInput(
                f"{shard.file} was written with another recipe ({name}: {written.get(name)!r}, here {value!r}): write "
                "all tables with the same recipe, and pass it to write_manifest."
            )
    return shard
