"""Selection of the source files of a build from files, folders and URIs that a user names."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import ObjectEntry
from concertina_trainer.data.build.file_names import Role, kind_of, role_of, why_unreadable
from concertina_trainer.data.build.sources import DataSource
from concertina_trainer.data.build.splits import TRAINING, split_of
from concertina_trainer.data.rangefile import listed

ADVICE = "choose files with --pattern, convert or remove these files, or build without them with --allow-left-out"
_SHOWN = 5
"""Maximum number of names in a line of the report."""


@dataclass(frozen=True)
class InputFile:
    """File that a build may use as a source."""

    name: str
    """Name of the file, relative to the location that the user named."""
    source: DataSource
    identity: str
    """Identity of the file, which is the same for all its names: its path without symbolic links, or its URI."""


@dataclass(frozen=True)
class LeftOut:
    """File or folder that a build does not use."""

    name: str
    reason: str
    data: bool = False
    """True if the file or folder may contain data that the user expects to be used."""


Listing = list[InputFile | LeftOut]


def find(
    locations: Sequence[str],
    pattern: str = "",
    allow_left_out: bool = False,
    out: str = "",
    say: Callable[[str], None] = lambda line: None,
    advice: str = ADVICE,
) -> list[DataSource]:
    """Return the source files of a build in a fixed order, and report which files are used and which are left out.

    With a pattern, the files of a folder that match it are used. Without a pattern, the folder's data files are used,
    or its text files if it has no data files. Files in `out` are results of a build, so they are never used.

    Raises:
        InvalidInput: In one of three cases: there is no file, there are several splits of a data set but no training
            split, or `allow_left_out` is false and a file that may contain data would be left out.
    """
    listing: Listing = []
    for location in locations:
        listing += [_named(location, item) for item in _within(_plain(location), pattern, _plain(out))]
    listing = _each_once(listing)
    taken_files = [item for item in listing if isinstance(item, InputFile)]
    left_out = [item for item in listing if isinstance(item, LeftOut)]
    for line in _report(taken_files, left_out):
        say(line)
    problems = [] if allow_left_out else [item for item in left_out if item.data]
    if problems:
        names = [f"{item.name} ({item.reason})" for item in problems]
        raise InvalidInput(
            f"Some files may contain data and would be left out: {_bounded(names)}. Nothing was built: {advice}."
        )
    if not taken_files:
        raise InvalidInput(f"no file matches {pattern or '**/*'} in {', '.join(locations)}.")
    return [item.source for item in taken_files]


def find_evaluation(locations: Sequence[str], say: Callable[[str], None] = lambda line: None) -> list[DataSource]:
    """Return the evaluation files that a user names by `--against`."""
    return find(
        locations, say=lambda line: say(f"--against: {line}"), advice="name the files themselves with --against"
    )


def _plain(location: str) -> str:
    """Return a location as a path or as the URI of a store, without `file://` and without a trailing slash."""
    plain = location.removeprefix("file://").rstrip("/")
    return plain or (location and "/")


def _within(location: str, pattern: str, out: str) -> Listing:
    """Return the files at a location, with names relative to the location.

    Raises:
        InvalidInput: When the location does not exist, or is neither a file nor a folder.
    """
    if "://" in location:
        objects = listed(location)
        if "" in objects:
            return _named_file(InputFile("", _object(location, objects[""]), location))
        return _select(location, _stored(location, objects, out), pattern)
    root = Path(location).absolute()
    try:
        status = root.stat()
    except OSError as error:
        problem = "is a broken link" if root.is_symlink() else "does not exist"
        raise InvalidInput(f"{location} {problem}: correct the path.") from error
    if stat.S_ISREG(status.st_mode):
        return _named_file(InputFile("", _local(str(root), status), os.path.realpath(root)))
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidInput(f"{location} is neither a file nor a folder: write its content to a file first.")
    return _select(str(root), _Walk(os.path.realpath(out) if out else "").files(str(root)), pattern)


def _named(location: str, item: InputFile | LeftOut) -> InputFile | LeftOut:
    """Return a copy of `item` with its full name: `location`, followed by the item's name."""
    return dataclasses.replace(item, name=f"{location.rstrip('/')}/{item.name}" if item.name else location)


def _named_file(file: InputFile) -> Listing:
    """Return a file that the user named, or a LeftOut with the reason why a build cannot read the file.

    Such a file counts as data whatever its name is. By contrast, a file in a folder is left out if its name shows that
    it is not data.
    """
    reason = why_unreadable(file.source.location)
    return [LeftOut(file.name, reason, data=True)] if reason else [file]


def _local(path: str, status: os.stat_result) -> DataSource:
    return DataSource(path, status.st_size, status.st_mtime_ns)


def _object(uri: str, entry: ObjectEntry) -> DataSource:
    return DataSource(uri, entry.size, int(entry.at.timestamp()) * 10**9)


def _stored(uri: str, objects: dict[str, ObjectEntry], out: str) -> Listing:
    """Return the objects of a store as files.

    Empty objects that represent folders are left out, and so are the objects in `out`.

    Raises:
        InvalidInput: When `uri` is the folder `out` itself.
    """
    if uri == out:
        raise _into_itself(uri)
    objects = {key: entry for key, entry in objects.items() if not f"{uri}/{key}".startswith(f"{out}/")}
    folders = {key[:end] for key in objects for end, letter in enumerate(key) if letter == "/"}
    hidden = {key: part for key in objects if (part := _hidden_part(key))}
    candidates = [
        InputFile(key, _object(f"{uri}/{key}", entry), f"{uri}/{key}")
        for key, entry in objects.items()
        if key not in hidden and not (key in folders and not entry.size)
    ]
    return [*candidates, *(LeftOut(part, "hidden") for part in dict.fromkeys(hidden.values()))]


def _into_itself(location: str) -> InvalidInput:
    return InvalidInput(f"--out is {location}, which is also a folder of sources: build into another folder.")


def _hidden_part(key: str) -> str:
    """Return the beginning of a key, up to and including its first hidden part (one that begins with a dot), or ""."""
    parts = key.split("/")
    return next(("/".join(parts[: i + 1]) for i, part in enumerate(parts) if part.startswith(".")), "")


class _Walk:
    """Search for files in a folder. It follows symbolic links to folders, but reads each real folder only once."""

    def __init__(self, out: str) -> None:
        self._out = out
        """Path of the build's output folder without symbolic links. The search skips this folder."""
        self._name_by_folder: dict[str, str] = {}
        self._links: list[tuple[str, str]] = []
        """Path and name of each symbolic link to a folder that the search has yet to follow.

        It visits real folders first.
        """

    def files(self, root: str) -> Iterator[InputFile | LeftOut]:
        real = os.path.realpath(root)
        if real == self._out:
            raise _into_itself(root)
        yield from self._folder(root, "", real)
        while self._links:
            links, self._links = self._links, []
            for path, name in links:
                yield from self._follow(path, name)

    def _follow(self, path: str, name: str) -> Iterator[InputFile | LeftOut]:
        real, parent = os.path.realpath(path), os.path.realpath(os.path.dirname(path))
        if os.path.commonpath([real, parent]) == real:
            yield LeftOut(name, "a link to a folder that contains it", data=real not in self._name_by_folder)
        else:
            yield from self._folder(path, name, real)

    def _folder(self, path: str, name: str, real: str) -> Iterator[InputFile | LeftOut]:
        if real == self._out:
            return
        if real in self._name_by_folder:
            yield LeftOut(f"{name} = {self._name_by_folder[real] or '.'}", "another name of a folder", data=True)
            return
        self._name_by_folder[real] = name
        try:
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError as error:
            raise InvalidInput(f"{path} can't be read: {error.strerror}.") from error
        for entry in entries:
            inner = f"{name}/{entry.name}" if name else entry.name
            yield from self._entry(entry, inner, real)

    def _entry(self, entry: os.DirEntry[str], name: str, folder: str) -> Iterator[InputFile | LeftOut]:
        if entry.name.startswith("."):
            yield LeftOut(name, "hidden")
            return
        try:
            status = entry.stat()
        except OSError as error:
            yield LeftOut(name, "a broken link" if entry.is_symlink() else f"{error.strerror}", data=True)
            return
        real = f"{folder.rstrip('/')}/{entry.name}"
        if stat.S_ISREG(status.st_mode):
            identity = os.path.realpath(entry.path) if entry.is_symlink() else real
            yield InputFile(name, _local(entry.path, status), identity)
        elif not stat.S_ISDIR(status.st_mode):
            yield LeftOut(name, "neither a file nor a folder")
        elif entry.is_symlink():
            self._links.append((entry.path, name))
        else:
            yield from self._folder(entry.path, name, real)


def _select(location: str, listing: Iterable[InputFile | LeftOut], pattern: str) -> Listing:
    """Divide the files of a folder into those that a build uses and those that it leaves out."""
    listing = sorted(listing, key=lambda item: item.name.split("/"))
    files = [item for item in listing if isinstance(item, InputFile)]
    chosen = _matching(files, pattern) if pattern else _training(location, files)
    return [*(item for item in listing if isinstance(item, LeftOut)), *chosen]


def _matching(files: Sequence[InputFile], pattern: str) -> Listing:
    parts = pattern.lower().removeprefix("./").split("/")
    chosen: Listing = []
    for file in files:
        if not _matches(file.name.lower().split("/"), parts):
            chosen.append(LeftOut(file.name, "not matched by --pattern"))
        else:
            reason = why_unreadable(file.name)
            chosen.append(LeftOut(file.name, reason, data=True) if reason else file)
    return chosen


def _matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a name matches a pattern as in a shell.

    `*` matches within the name of a file or folder, and `**` matches any number of folders.
    """
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_matches(name[i:], pattern[1:] or ["*"]) for i in range(len(name)))
    return bool(name) and fnmatch.fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])


_TAKEN: tuple[tuple[set[Role], set[Role]], ...] = (
    ({Role.DATA}, {Role.JSON, Role.PROSE}),
    ({Role.JSON}, {Role.PROSE, Role.OTHER}),
    ({Role.PROSE, Role.OTHER, Role.DESCRIPTION}, set()),
)
"""Pairs of sets of roles, in the order in which they are tried.

A pair applies if a file in the folder has a role in the pair's first set. The first pair that applies decides: files
with a role in its first set are used. Files with a role in its second set are left out, although they may contain data.
"""
_REASONS = {
    Role.JSON: "JSON beside other data",
    Role.PROSE: "text beside other data",
    Role.OTHER: "no data, judging by the name",
    Role.DESCRIPTION: "no data, judging by the name",
    Role.MARKER: "no data, judging by the name",
}


def _training(location: str, files: Sequence[InputFile]) -> Listing:
    """Return the data files of a folder, or its text files if it has no data files.

    If the files are splits of a data set (such as train and test), only the split `train` is returned.
    """
    role_by_name = {file.name: role_of(file.name) for file in files}
    present = set(role_by_name.values())
    chosen_roles, doubtful = next((roles for roles in _TAKEN if present & roles[0]), _TAKEN[-1])
    taken_files = [file for file in files if role_by_name[file.name] in chosen_roles]
    chosen: Listing = []
    for file in files:
        role = role_by_name[file.name]
        if role is Role.UNREADABLE:
            chosen.append(LeftOut(file.name, why_unreadable(file.name), data=True))
        elif role not in chosen_roles:
            chosen.append(LeftOut(file.name, _REASONS[role], data=role in doubtful))
    return [*chosen, *_of_split(location, taken_files, files, role_by_name)]


def _of_split(
    location: str, taken_files: Sequence[InputFile], files: Sequence[InputFile], role_by_name: dict[str, Role]
) -> Listing:
    dataset = any(file.name.lower() == "dataset_dict.json" for file in files)
    split_by_name = {
        file.name: file.name.partition("/")[0] if dataset else split_of(file.name)
        for file in taken_files
        if role_by_name[file.name] is not Role.DESCRIPTION
    }
    kinds = sorted(set(split_by_name.values()))
    if len(kinds) < 2 or "" in kinds:
        return list(taken_files)
    if TRAINING not in kinds:
        raise InvalidInput(
            f"{location} holds the splits {', '.join(kinds)}, and not {TRAINING}: choose files with --pattern."
        )
    return [
        file if kind == TRAINING else LeftOut(file.name, f"split {kind}" if kind else _REASONS[Role.OTHER])
        for file in taken_files
        for kind in [split_by_name.get(file.name, "")]
    ]


def _each_once(listing: Listing) -> Listing:
    """Return the listing with only one name for each file. Links can give a file several names.

    If a file with two names were used twice, its documents would be in the data set twice.
    """
    plain = {item.identity: item.name for item in reversed(listing) if isinstance(item, InputFile)}
    plain |= {
        item.identity: item.name
        for item in reversed(listing)
        if isinstance(item, InputFile) and item.source.location == item.identity
    }
    taken_identities: set[str] = set()
    once: Listing = []
    for item in listing:
        if isinstance(item, LeftOut):
            once.append(item)
        elif plain[item.identity] == item.name and item.identity not in taken_identities:
            taken_identities.add(item.identity)
            once.append(item)
        else:
            once.append(LeftOut(f"{item.name} = {plain[item.identity]}", "another name of a file", data=True))
    return once


def _report(inputs: Sequence[InputFile], left_out: Sequence[LeftOut]) -> Iterator[str]:
    """Yield a line about the files that are used, and a line for each reason why files are left out."""
    counts = Counter(kind_of(item.source.location).suffix or "without a suffix" for item in inputs)
    if inputs:
        yield f"taken: {_files(len(inputs))} ({_bounded([f'{n:,} {suffix}' for suffix, n in counts.most_common()])})"
    names_by_reason: dict[str, list[str]] = {}
    for item in left_out:
        names_by_reason.setdefault(item.reason, []).append(item.name)
    for reason, names in names_by_reason.items():
        yield f"left out: {len(names):,} ({reason}): {_bounded(names)}"


def _files(count: int) -> str:
    return f"{count:,} file" if count == 1 else f"{count:,} files"


def _bounded(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
