"""Command line for preparing data: `concertina data ...`, or `python -m concertina_trainer.cli data ...`.

The parser uses only the standard library. Each command imports the packages that it needs, so that `--help` works
without numpy and obstore.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from concertina_data.data_manifest import NAME, VALIDATION, DataManifest, Field, parse, parse_field
from concertina_protocol.worker_channel import BAD_INPUT_EXIT
from concertina_state.errors import InvalidInput
from concertina_trainer.data.defaults import BYTES, COLUMN, NGRAM, SHARD_BYTES

_WIDTH = 30
_SHOWN = 20
"""Number of shards that `show` lists without --all."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m concertina_trainer.cli") -> int:
    options = parser(prog).parse_args(argv)
    try:
        return _run(options)
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return BAD_INPUT_EXIT


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of all commands, from which the reference of the command line is also generated."""
    parser = argparse.ArgumentParser(prog=prog, description="Prepare data for the bundled trainer.")
    data = parser.add_subparsers(required=True).add_parser("data", help="token shards").add_subparsers(required=True)
    _build_options(data.add_parser("build", help="write token shards and their manifest"))
    showing = data.add_parser("show", help="print a summary of a manifest")
    showing.add_argument("uri")
    showing.add_argument("--all", action="store_true", help=f"list all shards, not only the first {_SHOWN}")
    showing.set_defaults(run=_show)
    checking = data.add_parser("verify", help="read all shards and compare them with the manifest")
    checking.add_argument("uri")
    checking.add_argument(
        "--threads", type=_at_least(1), default=8, help="shards to read at once (default: %(default)s)"
    )
    checking.set_defaults(run=_verify)
    packing = data.add_parser(
        "pack", help="plan how whole documents are put into sequences (for trainer.data.documents Packed and Bucketed)"
    )
    packing.add_argument("uri")
    packing.add_argument("--length", type=_at_least(2), required=True, help="trainer.model.sequenceLength")
    packing.add_argument(
        "--threads", type=_at_least(1), default=8, help="shards to plan at once (default: %(default)s)"
    )
    packing.set_defaults(run=_pack)
    return parser


def _run(options: argparse.Namespace) -> int:
    from concertina_state.objects.prefix import StorageError

    try:
        return int(options.run(options) or 0)
    except StorageError as error:
        print(error, file=sys.stderr)
        return 1


def _build_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("sources", nargs="+", help="files (.jsonl, .parquet, .arrow, .tar, .tfrecord, .npy, .npz, text), folders, URIs")
    add("--out", required=True, help="folder to build into: a path, file:///folder or s3://bucket/folder")
    add(
        "--pattern",
        default="",
        help="files of a folder to read, as **/*.txt (default: its data files, or its text files if it has none)",
    )
    add("--allow-left-out", action="store_true", help="build even if files that may contain data are left out")
    add("--tokenizer", default=BYTES, help="tokenizer: bytes, FILE.json, tiktoken:ENCODING or FILE.tiktoken")
    add("--separator", default="", help="token that ends a document (default: the tokenizer's own one)")
    add("--split-pattern", default="", help="regular expression by which a FILE.tiktoken splits text before it merges")
    add(
        "--column",
        default=COLUMN,
        help="column with the text in .jsonl, .parquet, .arrow, .tar and .tfrecord files (default: %(default)s)",
    )
    add(
        "--validation",
        type=float,
        default=0.0,
        help="share of the documents to set aside for evaluation, chosen by hash (default: %(default)g)",
    )
    add(
        "--against",
        action="append",
        default=[],
        metavar="FILE",
        help="evaluation data: count their n-grams that also occur in the training data",
    )
    add(
        "--most-overlapping",
        type=_at_least(0),
        metavar="N",
        help="with --against: fail if more than N training documents share n-grams with the evaluation data",
    )
    add(
        "--duplicates",
        choices=("keep", "count", "remove"),
        default="keep",
        help="documents with equal content: keep them, count them, or remove all but the first (default: %(default)s)",
    )
    add("--against-column", default="", help="column with the text of the evaluation data (default: that of --column)")
    add("--ngram", type=_at_least(1), default=NGRAM, help="number of words in an n-gram (default: %(default)s)")
    add(
        "--shard-mebibytes",
        type=_at_least(0.001, float),
        default=SHARD_BYTES / 2**20,
        help="amount of text in a shard (default: %(default)g)",
    )
    add("--tokens", default="", metavar="COLUMN", help="column with token ids, instead of text to tokenize")
    add("--vocab-size", type=_at_least(1), default=0, help="with --tokens: token ids must be below this number")
    add(
        "--field",
        type=_field,
        action="append",
        default=[],
        metavar="NAME=TYPE",
        help="column with one value for each token, as time=int64, or with vectors, as features=float16x20",
    )
    add(
        "--processes",
        type=_at_least(1),
        default=os.cpu_count() or 1,
        help="number of processes (default: one per core)",
    )
    add(
        "--share",
        type=_share,
        default=(0, 1),
        metavar="I/N",
        help="build share I of N, counted from 0, to divide a build among N machines",
    )
    add("--chat", action="store_true", help="the sources are chats (messages), or prompts with completions")
    add(
        "--length",
        type=_at_least(2),
        help="with --chat: number of tokens after which a chat is cut; give the job's trainer.model.sequenceLength",
    )
    add("--split-turns", action="store_true", help="with --chat: make one sample of each turn of the assistant")
    parser.set_defaults(run=_build)


def _at_least(least: float, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """Return a function for argparse's `type=` that converts a text by `kind` and rejects numbers below `least`."""

    def parsed(text: str) -> float:
        with contextlib.suppress(ValueError):
            if (number := kind(text)) >= least:
                return number
        raise argparse.ArgumentTypeError(f"give a {'whole ' if kind is int else ''}number of {least} or more")

    return parsed


def _field(text: str) -> Field:
    try:
        return parse_field(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}: give NAME=TYPE, such as features=float16x20") from error


def _share(text: str) -> tuple[int, int]:
    with contextlib.suppress(ValueError):
        index, count = (int(number) for number in text.split("/"))
        if 0 <= index < count:
            return index, count
    raise argparse.ArgumentTypeError("give I/N with I from 0 to N - 1, such as 3/16")


def _build(options: argparse.Namespace) -> None:
    from concertina_trainer.data.build import build as building
    from concertina_trainer.data.build.find import find, find_evaluation
    from concertina_trainer.data.build.recipe import ChatRecipe, Duplicates, Recipe, TypedRecipe

    if not 0 <= options.validation < 1:
        raise InvalidInput("--validation is the share of documents to set aside: give a number from 0 to below 1.")
    recipe = Recipe(
        options.tokenizer, options.separator, options.split_pattern, options.column, options.validation,
        Duplicates(options.duplicates), tuple(options.against), options.ngram, options.against_column,
    )  # fmt: skip
    if options.most_overlapping is not None and not options.against:
        raise InvalidInput("--most-overlapping needs --against, the evaluation data to compare with.")
    if options.chat:
        if options.length is None:
            raise InvalidInput("--chat needs --length, the longest sequence that is trained: give one, as 2048.")
        recipe = dataclasses.replace(recipe, chats=ChatRecipe(options.length, options.split_turns))
    elif options.length is not None or options.split_turns:
        raise InvalidInput("--length and --split-turns are for chats: add --chat, or leave them out.")
    if options.tokens or options.vocab_size or options.field:
        if recipe.chats or recipe.against:
            raise InvalidInput("--chat and --against are for text: leave them out, or --tokens and --field.")
        typed = TypedRecipe.of(options.tokens, options.vocab_size, tuple(options.field))
        recipe = dataclasses.replace(recipe, typed=typed)
    sources = find(options.sources, options.pattern, options.allow_left_out, options.out, _say)
    if recipe.against:
        find_evaluation(recipe.against, _say)
    recipe.load_tokenizer()  # reports an error here, instead of in every process
    size = int(options.shard_mebibytes * 2**20)
    bar = _Bar()
    last = None
    for last in building.build(
        sources, options.out, size, recipe, options.processes, options.share, options.most_overlapping
    ):
        bar.show(last.done, last.total)
    bar.end()
    if last is None or last.manifest is None:
        print(
            f"{options.out}: share {options.share[0]} of {options.share[1]} is built. Shares of other "
            "machines are not finished yet."
        )
        return
    for uri, manifest in _manifests(options.out):
        print(f"{uri}: {_summary(manifest)}")
    if last.duplicates is not None:
        outcome = "removed" if recipe.duplicates is Duplicates.removed else "kept"
        print(f"{last.duplicates:,} documents occur earlier in the data, and were {outcome}")
    for line in _overlap_lines(last.overlap):
        print(line)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


class _Bar:
    """Progress bar, shown only if standard error is a terminal."""

    def __init__(self, unit: str = "MB", size: float = 1e6) -> None:
        self._unit, self._size = unit, size
        self._started = time.monotonic()
        self._first = -1
        self._shown = sys.stderr.isatty()

    def show(self, done: int, total: int) -> None:
        self._first = done if self._first < 0 else self._first
        if not self._shown:
            return
        speed = (done - self._first) / max(1e-9, time.monotonic() - self._started)
        remaining_time = f"{(total - done) / speed:.0f} s left" if speed else ""
        bar = ("#" * (_WIDTH * done // max(1, total))).ljust(_WIDTH)
        done_, total_, speed_ = (number / self._size for number in (done, total, speed))
        line = f"\r[{bar}] {done_:,.1f}/{total_:,.1f} {self._unit}  {speed_:,.1f} {self._unit}/s  {remaining_time}"
        print(line.ljust(90), end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shown:
            print(file=sys.stderr)


def _overlap_lines(overlap: dict[str, object] | None) -> list[str]:
    if overlap is None:
        return []
    files = overlap["files"]
    assert isinstance(files, list)
    head = (
        f"{overlap['trainingDocuments']:,} documents share {overlap['ngram']} consecutive words with "
        "the evaluation data:"
    )
    return [head] + [
        f"  {file['file']}: {file['documentsFound']:,} of {file['documents']:,} documents, "
        f"{file['ngramsFound']:,} of {file['ngrams']:,} n-grams found; {file['tooShort']:,} documents are "
        "too short to compare"
        for file in files
    ]


def _manifests(uri: str) -> Iterator[tuple[str, DataManifest]]:
    """Yield the manifest of the data, and that of the validation data if it exists, each after its URI.

    Raises:
        InvalidInput: When there is no manifest, or it is damaged.
        StorageError: When storage can't be read.
    """
    from concertina_state.objects.prefix import ObjectPrefix

    yield uri, _manifest(uri)
    aside = ObjectPrefix(uri).get(f"{VALIDATION}/{NAME}")
    if aside is not None:
        yield (where := f"{uri.rstrip('/')}/{VALIDATION}"), parse(aside, where)


def _manifest(uri: str) -> DataManifest:
    from concertina_state.objects.prefix import ObjectPrefix

    text = ObjectPrefix(uri).get(NAME)
    if text is None:
        raise InvalidInput(f"{uri} has no {NAME}: build the data there first with `concertina data build`.")
    return parse(text, uri)


def _show(options: argparse.Namespace) -> None:
    for uri, manifest in _manifests(options.uri):
        print(f"{uri}: {_summary(manifest)}")
        shown = manifest.shards if options.all else manifest.shards[:_SHOWN]
        for shard in shown:
            print(
                f"{shard.file}  {shard.tokens:,} tokens  {shard.documents:,} documents  sha256 {shard.sha256[:16]}..."
            )
        if len(shown) < len(manifest.shards):
            print(f"... and {len(manifest.shards) - len(shown):,} more (--all)")


def _verify(options: argparse.Namespace) -> int:
    from concertina_state.objects.prefix import ObjectPrefix
    from concertina_trainer.data.build.verify import verify

    damaged = False
    for uri, manifest in _manifests(options.uri):
        bar, read, problems = _Bar(), 0, 0
        total = sum(shard.size for shard in manifest.shards)
        for shard, problem in verify(ObjectPrefix(uri), manifest, options.threads):
            read += shard.size
            bar.show(read, total)
            if problem:
                problems += 1
                print(problem, file=sys.stderr)
        bar.end()
        print(f"{uri}: {problems or 'no'} of {len(manifest.shards)} shards damaged; {_summary(manifest)}")
        damaged |= problems > 0
    return 1 if damaged else 0


def _pack(options: argparse.Namespace) -> None:
    from concertina_state.objects.prefix import ObjectPrefix
    from concertina_trainer.data.packing import name, pack

    manifest = _manifest(options.uri)
    bar = _Bar("shards", 1)
    for done, packing in pack(ObjectPrefix(options.uri), manifest, options.length, options.threads):
        bar.show(done, len(manifest.shards))
        if packing is not None:
            bar.end()
            print(
                f"{options.uri}/{name(options.length)}: {sum(packing.packed):,} packed sequences of {options.length} "
                f"tokens, {packing.fill:.2%} full; {sum(packing.bucketed):,} with a document each"
            )


def _summary(manifest: DataManifest) -> str:
    if manifest.more_fields or (manifest.weighted and not manifest.chats) or not manifest.vocab_size:
        return (
            f"{manifest.tokens:,} elements of {manifest.tokenizer.name} in {manifest.documents:,} documents and "
            f"{len(manifest.shards)} shards, digest {manifest.digest}"
        )
    if (chats := manifest.chats) is not None:
        return (
            f"{manifest.documents:,} chats of {manifest.tokens:,} tokens, of which {chats.trained:,} are trained, in "
            f"{len(manifest.shards)} shards, digest {manifest.digest}; {chats.truncated:,} chats were cut to "
            f"{chats.length:,} predicted tokens, and {chats.dropped:,} dropped, because nothing in them is trained"
        )
    return (
        f"{manifest.tokens:,} tokens of {manifest.vocab_size} values ({manifest.tokenizer.name}) in "
        f"{manifest.documents:,} documents and {len(manifest.shards)} shards, digest {manifest.digest}"
    )


if __name__ == "__main__":
    sys.exit(main())
