"""Results of GPU checks: as JSON without names of hosts and users, and as one table of several machines' results."""

from __future__ import annotations

import dataclasses
import enum
import getpass
import json
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from builders.gpu.machine import ROOT, Machine

FORMAT = 1
ERROR_LINES = 20
PUBLIC_USERS = frozenset({"root", "user", "ubuntu", "debian"})
"""Users whose names say nothing about a person, and are words of error messages."""


class Outcome(enum.Enum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_RUNNABLE = "not runnable"
    SKIPPED = "skipped"
    NOT_REACHED = "not reached"


@dataclasses.dataclass(frozen=True)
class Case:
    """One test of a check."""

    name: str
    outcome: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Result:
    name: str
    outcome: Outcome
    reason: str = ""
    """Why the check has not passed, in one line."""
    seconds: float = 0.0
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cases: tuple[Case, ...] = ()
    error: tuple[str, ...] = ()
    """The last lines of the error."""

    @property
    def line(self) -> str:
        took = f" ({self.seconds:.0f} s)" if self.seconds else ""
        return f"{self.outcome.value:<12} {self.name}{took}" + (f": {self.reason}" if self.reason else "")


@dataclasses.dataclass(frozen=True)
class Revision:
    commit: str
    dirty: bool | None
    """Whether the sources differ from the commit, or None if that is unknown."""

    @classmethod
    def of(cls, described: str) -> Revision:
        """Read what `git describe --always --dirty` prints."""
        if not described:
            return cls("unknown", None)
        return cls(described.removesuffix("-dirty"), described.endswith("-dirty"))


def private_words() -> dict[str, str]:
    """Return what results must not hold, and what stands in its place."""
    words = {str(ROOT): "."}
    if (home := os.path.expanduser("~")) not in ("/", "~"):
        words[home] = "~"
    hosts = {socket.gethostname(), socket.getfqdn(), socket.gethostname().partition(".")[0]} - {"localhost", ""}
    words |= dict.fromkeys(sorted(hosts, key=len, reverse=True), "HOST")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a number without a name
        user = ""
    return words | ({user: "USER"} if user and user not in PUBLIC_USERS else {})


ADDRESS = re.compile(
    r"(?<![\w.])(?!127\.)\d{1,3}(?:\.\d{1,3}){3}(?![\w.]\w)"
    r"|(?<![\w:])(?:[0-9a-fA-F]{1,4}:{1,2}){3,7}[0-9a-fA-F]{1,4}(?![\w:])"
)
"""An IPv4 address that is not a loopback one, a long IPv6 address, or a MAC address."""


def scrubbed(text: str, private: Mapping[str, str]) -> str:
    """Replace names of the host and the user, paths to their folders, and network addresses."""
    for word, replacement in private.items():
        text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", replacement, text)
    return ADDRESS.sub("ADDRESS", text)


def card_name(machine: Machine) -> str:
    return machine.cards[0].name if machine.cards else "no GPU"


def default_path(machine: Machine, revision: Revision) -> Path:
    card = re.sub(r"[^a-z0-9]+", "-", card_name(machine).lower()).strip("-")
    return ROOT / "out" / f"gpu-{card}-{revision.commit[:12]}{'-dirty' if revision.dirty else ''}.json"


def document(
    machine: Machine, revision: Revision, date: str, seconds: float, results: Iterable[Result]
) -> dict[str, Any]:
    private = private_words()
    return {
        "format": FORMAT,
        "commit": revision.commit,
        "dirty": revision.dirty,
        "date": date,
        "card": card_name(machine),
        "gpus": len(machine.cards),
        "memoryGiB": round(machine.cards[0].memory_gib, 1) if machine.cards else None,
        "driver": machine.driver,
        "cuda": machine.cuda,
        "nccl": machine.nccl,
        "torch": machine.torch,
        "namesAddedToTorch": list(machine.added_names),
        "python": machine.python,
        "seconds": round(seconds, 1),
        "checks": [_public(result, private) for result in results],
    }


def _public(result: Result, private: Mapping[str, str]) -> dict[str, Any]:
    return {
        **dataclasses.asdict(result),
        "outcome": result.outcome.value,
        "reason": scrubbed(result.reason, private),
        "figures": {name: scrubbed(value, private) if isinstance(value, str) else value
                    for name, value in result.figures.items()},
        "error": [scrubbed(line, private) for line in result.error],
    }  # fmt: skip


def write(path: Path, contents: Mapping[str, Any]) -> None:
    """Write a whole file at once: the process may be killed at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


class UnreadableResults(Exception):
    """The file holds no results, or results of another format."""


def read(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnreadableResults(f"{path}: {error}") from error
    if not isinstance(contents, dict) or contents.get("format") != FORMAT or "checks" not in contents:
        raise UnreadableResults(f"{path} holds no results of `make test-gpu` in format {FORMAT}")
    return contents


def table(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return Markdown: a column for each card, torch and commit, a row for each outcome and each figure."""
    columns: dict[str, list[Mapping[str, Any]]] = {}
    for results in documents:
        columns.setdefault(_column(results), []).append(results)
    rows: dict[str, dict[str, list[str]]] = {}
    for column, group in columns.items():
        for check in (check for results in group for check in results["checks"]):
            rows.setdefault(check["name"], {}).setdefault(column, []).append(check["outcome"])
    for column, group in columns.items():
        for check in (check for results in group for check in results["checks"]):
            for figure, value in check["figures"].items():
                rows.setdefault(f"{check['name']}: {figure}", {}).setdefault(column, []).append(_shown(value))
    lines = [["", *columns], ["---"] * (1 + len(columns))]
    lines += [[name, *("; ".join(cells.get(column, ["-"])) for column in columns)] for name, cells in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _column(results: Mapping[str, Any]) -> str:
    dirty = "" if results["dirty"] is False else " (changed)" if results["dirty"] else " (maybe changed)"
    return f"{results['card']}, torch {results['torch']}, {results['commit'][:12]}{dirty}"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
