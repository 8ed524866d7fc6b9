"""Format of a file by its name alone. Names are compared without case."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

TEXT = "text"
JSON_LINES = "jsonl"
PARQUET = "parquet"
ARROW = "arrow"
FRAMES = "frames"
FORMATS = {
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".json": JSON_LINES,
    ".parquet": PARQUET,
    ".arrow": ARROW,
    ".npy": FRAMES,
    ".npz": FRAMES,
}
"""Formats by the end of a name. A file with another end is one document of text."""
COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}
"""Compressions of JSON lines and of text that a build reads."""
UNREADABLE = {
    **dict.fromkeys((".tar", ".tgz", ".tbz2", ".txz", ".zip", ".7z", ".rar"), "an archive, which is not read"),
    **dict.fromkeys(
        (".lz4", ".lzma", ".z", ".br", ".sz", ".snappy", ".lzo", ".zstd"), "a compression that is not read"
    ),
    **dict.fromkeys((".csv", ".tsv"), "CSV or TSV, which is not read"),
    **dict.fromkeys((".pdf", ".doc", ".docx", ".odt", ".epub", ".pptx"), "a document format that is not read"),
    **dict.fromkeys((".xls", ".xlsx", ".orc", ".avro", ".feather", ".dta"), "a table format that is not read"),
    **dict.fromkeys(
        (".warc", ".wet", ".wat", ".tfrecord", ".tfrecords", ".array_record", ".mds"),
        "a record format that is not read",
    ),
    **dict.fromkeys((".sqlite", ".sqlite3", ".db", ".mdb", ".lmdb"), "a database, which is not read"),
    **dict.fromkeys(
        (".h5", ".hdf5", ".pkl", ".pickle", ".pt", ".pth", ".safetensors", ".bin"), "binary data, which is not read"
    ),
}
"""Why a build doesn't read a file, by the end of its name. The build refuses to leave such files out unasked."""
_WITH_PARTS = frozenset((".jsonl", ".ndjson", ".parquet", ".arrow", ".gz", ".bz2", ".xz", ".zst"))
"""A file whose name continues after one of these suffixes (`a.jsonl.part`) is data in a form that is not known."""
_MARKER = re.compile(
    r"_success|_(committed|started)_.*|_metadata|_common_metadata|.*_\$folder\$|thumbs\.db|desktop\.ini"
    r"|dataset_infos?\.json|dataset_dict\.json|state\.json"
    r"|.*\.(png|jpe?g|gif|webp|bmp|ico|ttf|woff2?|so|o|exe|pyc)"
    r"|.*\.(crc|md5|sha1|sha256|sha512|asc|sig|lock)|(md5|sha1|sha256|sha512)sums?(\.txt)?"
)
_UNCOMMITTED = "_temporary"
"""The folder of a Spark job's output that was not committed."""
_DESCRIPTION = re.compile(
    r"(readme|licen[cs]e|notice|copying|changelog|citation|authors|contributing|requirements)\b.*"
)
_PROSE = frozenset((".txt", ".text"))


@dataclass(frozen=True)
class FileKind:
    format: str
    compression: str = ""
    """A value of COMPRESSIONS, or "" for a plain file."""
    suffix: str = ""
    """End of the name in lower case, as people know it: `.jsonl.gz`."""


class Role(enum.Enum):
    """Part that a file has in a folder of sources."""

    DATA = "data"
    JSON = "JSON"
    """JSON lines, or a JSON file that describes the data beside it."""
    PROSE = "text"
    """Text that is likely to be meant as data: `.txt`, or compressed."""
    OTHER = "other"
    """Text, if the folder has no data of another kind."""
    DESCRIPTION = "description"
    """README, LICENSE and the like: text, if the folder has no data of another kind."""
    MARKER = "marker"
    """An image, a program, or a file of Spark, `datasets` or a checksum tool; never a document."""
    UNREADABLE = "unreadable"


def kind_of(name: str) -> FileKind:
    """Return the format and the compression of a file of this name."""
    inner, outer = _ends(name)
    if outer in COMPRESSIONS:
        return FileKind(FORMATS.get(inner, TEXT), COMPRESSIONS[outer], inner + outer)
    return FileKind(FORMATS.get(outer, TEXT), "", outer)


def why_unreadable(name: str) -> str:
    """Return what makes a file of this name unreadable for a build, or "" if nothing does."""
    inner, outer = _ends(name)
    kind = kind_of(name)
    if outer in UNREADABLE:
        return UNREADABLE[outer]
    if kind.compression and inner in UNREADABLE:
        return UNREADABLE[inner]
    if kind.compression and inner in COMPRESSIONS:
        return "compressed twice"
    if kind.compression and kind.format in (PARQUET, ARROW, FRAMES):
        return f"compressed {inner}, which must be unpacked first"
    if inner in _WITH_PARTS and not kind.compression and kind.format == TEXT:
        return f"{inner} data in another form, or incomplete"
    return ""


def role_of(name: str) -> Role:
    """Return the role of a file in its folder of sources, from its name relative to that folder."""
    *folders, base = name.lower().split("/")
    kind = kind_of(base)
    if _UNCOMMITTED in folders or _MARKER.fullmatch(base):
        return Role.MARKER
    if why_unreadable(base):
        return Role.UNREADABLE
    if kind.suffix == ".json":
        return Role.JSON
    if kind.format != TEXT:
        return Role.DATA
    if _DESCRIPTION.fullmatch(base):
        return Role.DESCRIPTION
    return Role.PROSE if kind.compression or kind.suffix in _PROSE else Role.OTHER


def _ends(name: str) -> tuple[str, str]:
    """Return the last two suffixes of a name in lower case, "" where it has fewer."""
    parts = name.lower().rpartition("/")[2].lstrip(".").split(".")
    outer = f".{parts[-1]}" if len(parts) > 1 else ""
    inner = f".{parts[-2]}" if len(parts) > 2 else ""
    return inner, outer
