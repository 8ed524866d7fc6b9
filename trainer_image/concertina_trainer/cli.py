"""Preparing data for the bundled trainer.

python -m concertina_trainer.cli data build --out s3://bucket/folder FILES_OR_FOLDERS...
python -m concertina_trainer.cli data show s3://bucket/folder
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from concertina_trainer.data.build import SHARD_BYTES, build
from concertina_trainer.data.manifest import NAME, Manifest, parse
from concertina_trainer.errors import BadInput
from concertina_trainer.storage import Folder, StorageError

_WIDTH = 30


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m concertina_trainer.cli", description=__doc__.partition("\n")[0])
    data = parser.add_subparsers(required=True).add_parser("data", help="token shards").add_subparsers(required=True)
    building = data.add_parser("build", help="write byte-level token shards and their manifest")
    building.add_argument("files", nargs="+", type=Path, help="text files, and folders to look for --pattern in")
    building.add_argument("--out", required=True, help="folder, file:///... or s3://bucket/folder")
    building.add_argument("--pattern", default="**/*", help="which files of a folder (default: %(default)s)")
    building.add_argument("--shard-mebibytes", type=float, default=SHARD_BYTES / 2**20, help="default: %(default)g")
    building.set_defaults(run=_build)
    showing = data.add_parser("show", help="say what a manifest holds")
    showing.add_argument("uri")
    showing.set_defaults(run=_show)
    options = parser.parse_args(argv)
    try:
        options.run(options)
    except (BadInput, StorageError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _build(options: argparse.Namespace) -> None:
    files = [file for path in options.files for file in _files(path, options.pattern)]
    if not files:
        raise BadInput(f"no file matches {options.pattern} in {', '.join(map(str, options.files))}.")
    for done, total, manifest in build(files, options.out, int(options.shard_mebibytes * 2**20)):
        if sys.stderr.isatty():
            bar = ("#" * (_WIDTH * done // total)).ljust(_WIDTH)
            print(f"\r[{bar}] {done}/{total} files", end="\n" if manifest else "", file=sys.stderr, flush=True)
        if manifest:
            print(f"{options.out}: {_summary(manifest)}")


def _files(path: Path, pattern: str) -> Iterator[Path]:
    if not path.exists():
        raise BadInput(f"{path} does not exist.")
    yield from [path] if path.is_file() else sorted(file for file in path.glob(pattern) if file.is_file())


def _show(options: argparse.Namespace) -> None:
    text = Folder(options.uri).get(NAME)
    if text is None:
        raise BadInput(f"{options.uri} has no {NAME}: build the data there first.")
    manifest = parse(text, options.uri)
    print(_summary(manifest))
    for shard in manifest.shards:
        print(f"{shard.file}  {shard.tokens:,} tokens  {shard.documents:,} documents  sha256 {shard.sha256[:16]}...")


def _summary(manifest: Manifest) -> str:
    documents = sum(shard.documents for shard in manifest.shards)
    return (
        f"{manifest.tokens:,} tokens of {manifest.vocab_size} values in {documents:,} documents and "
        f"{len(manifest.shards)} shards, digest {manifest.digest}"
    )


if __name__ == "__main__":
    sys.exit(main())
