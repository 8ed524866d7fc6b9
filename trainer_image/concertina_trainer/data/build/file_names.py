"""Format of a file, found from the file's name alone. Case is ignored."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

TEXT = "text"
JSON_LINES = "jsonl"
PARQUET = "parquet"
ARROW = "arrow"
WEBDATASET = "a tar archive"
TFRECORD = "TFRecord"
FRAMES = "NumPy"
FORMATS = {
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".json": JSON_LINES,
    ".parquet": PARQUET,
    ".arrow": ARROW,
    ".feather": ARROW,
    ".tar": WEBDATASET,
    ".tfrecord": TFRECORD,
    ".tfrecords": TFRECORD,
    ".npy": FRAMES,
    ".npz": FRAMES,
}
"""Format of a file, keyed by the last suffix of the file's name. A file with any other suffix is one text document."""
COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}
"""Supported compressions of text, JSON lines, tar archives and TFRecord files, keyed by suffix."""
UNREADABLE = {
    **dict.fromkeys((".zip", ".7z", ".rar"), "of archives, only .tar is supported"),
    **dict.fromkeys((".tgz", ".tbz2", ".txz"), "this suffix is not supported: rename it, as .tar.gz"),
    **dict.fromkeys(
        (".lz4", ".lzma", ".z", ".br", ".sz", ".snappy", ".lzo", ".zstd"), "this compression is not supported"
    ),
    **dict.fromkeys((".csv", ".tsv"), "CSV and TSV are not supported"),
    **dict.fromkeys((".pdf", ".doc", ".docx", ".odt", ".epub", ".pptx"), "this document format is not supported"),
    **dict.fromkeys((".xls", ".xlsx", ".orc", ".avro", ".dta"), "this table format is not supported"),
    **dict.fromkeys((".warc", ".wet", ".wat", ".array_record", ".mds"), "this record format is not supported"),
    **dict.fromkeys((".sqlite", ".sqlite3", ".db", ".mdb", ".lmdb"), "databases are not supported"),
    **dict.fromkeys(
        (".h5", ".hdf5", ".pkl", ".pickle", ".pt", ".pth", ".safetensors", ".bin"),
        "this binary format is not supported",
    ),
}
"""Reasons why a build does not read a file, by the file's suffix.

Such a file may contain data. The build fails if it finds such a file, unless the user allows the file to be left out.
"""
_WITH_PARTS = frozenset((".jsonl", ".ndjson", ".parquet", ".arrow", ".tar", ".tfrecord", ".gz", ".bz2", ".xz", ".zst"))
"""Suffixes after which a longer name shows an incomplete file. Such a file (`a.jsonl.part`) is not read."""
_MARKER = re.compile(
    r"_success|_(committed|started)_.*|_metadata|_common_metadata|.*_\$folder\$|thumbs\.db|desktop\.ini"
    r"|dataset_infos?\.json|dataset_dict\.json|state\.json"
    r"|.*\.(png|jpe?g|gif|webp|bmp|ico|ttf|woff2?|so|o|exe|pyc)"
    r"|.*\.(crc|md5|sha1|sha256|sha512|asc|sig|lock)|(md5|sha1|sha256|sha512)sums?(\.txt)?"
)
_UNCOMMITTED = "_temporary"
"""Folder of the output of a Spark job that was not committed."""
_DESCRIPTION = re.compile(
    r"(readme|licen[cs]e|notice|copying|changelog|citation|authors|contributing|requirements)\b.*"
)
_PROSE = frozenset((".txt", ".text"))


@dataclass(frozen=True)
class FileKind:
    format: str
    compression: str = ""
    """Compression, which is a value of COMPRESSIONS, or "" for none."""
    suffix: str = ""
    """End of the name in lower case, including the suffix of a compression: `.jsonl.gz`."""


class Role(enum.Enum):
    """Role of a file in a folder of sources, which decides whether a build reads the file."""

    DATA = "data"
    JSON = "JSON"
    """JSON lines, or a JSON file that describes other data in the folder."""
    PROSE = "text"
    """Text that is probably data, such as a `.txt` file or compressed text."""
    OTHER = "other"
    """Other text, which is read only if the folder has neither data files nor JSON."""
    DESCRIPTION = "description"
    """README, LICENSE and the like, which are read only if the folder has neither data files nor JSON."""
    MARKER = "marker"
    """File that is never data: an image, a program, or a file of Spark, `datasets` or a checksum tool."""
    UNREADABLE = "unreadable"


def kind_of(name: str) -> FileKind:
    """Return the format and the compression of a file with this name."""
    inner, outer = _ends(name)
    if outer in COMPRESSIONS:
        return FileKind(FORMATS.get(inner, TEXT), COMPRESSIONS[outer], inner + outer)
    return FileKind(FORMATS.get(outer, TEXT), "", outer)


def why_unreadable(name: str) -> str:
    """Return the reason why a build can't read a file with the name `name`, or "" if it can."""
    inner, outer = _ends(name)
    kind = kind_of(name)
    if outer in UNREADABLE:
        return UNREADABLE[outer]
    if kind.compression and inner in UNREADABLE:
        return UNREADABLE[inner]
    if kind.compression and inner in COMPRESSIONS:
        return "compressed twice"
    if kind.compression and kind.format in (PARQUET, ARROW, FRAMES):
        return f"{inner} files must not be compressed: unpack them first"
    if inner in _WITH_PARTS and not kind.compression and kind.format == TEXT:
        return f"its name has more after {inner}, so it may be incomplete"
    return ""


def role_of(name: str) -> Role:
    """Return the role of a file, given its name relative to the folder of sources."""
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


_NUMBERED = re.compile(r"-\d+-of-\d+$")
"""End of the name of one of several files, as TensorFlow names them: `train.tfrecord-00003-of-00010`."""


def _ends(name: str) -> tuple[str, str]:
    """Return the last two suffixes of a name in lower case. A suffix is "" if the name has fewer than two."""
    parts = _NUMBERED.sub("", name.lower().rpartition("/")[2].lstrip(".")).split(".")
    outer = f".{parts[-1]}" if len(parts) > 1 else ""
    inner = f".{parts[-2]}" if len(parts) > 2 else ""
    return inner, outer
