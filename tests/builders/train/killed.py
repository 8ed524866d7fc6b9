"""Runs of a script of tests/programs/loops: to its end, or until all ranks are killed and restored.

The restored run continues from the saved state, in a world of the same or another size. `differences` compares it with
an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import os
import pickle
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from builders.train import node
from builders.train.node import Parent

GIVE_UP_SECONDS, POLL_SECONDS = 120.0, 0.005


@dataclasses.dataclass
class Ran:
    """Result of one run of a script. Lists are indexed by rank."""

    codes: list[int]
    output: str
    steps: list[dict[int, dict[str, Any]]]
    """For each rank, what it recorded in each step."""
    committed: list[dict[int, dict[str, Any]]]
    """For each rank, the state of its objects when each step was committed."""
    restored: list[tuple[int, dict[str, Any]]]
    """For each rank, the step to continue with, and the state that its objects had after the restore."""
    end: list[dict[str, Any]]

    @property
    def size(self) -> int:
        return len(self.codes)

    @property
    def failed(self) -> bool:
        """Whether a rank has failed without being killed."""
        return any(code > 0 for code in self.codes)

    @property
    def restored_step(self) -> int:
        steps = {step for step, _ in self.restored}
        assert len(steps) == 1, f"ranks go on with different steps: {steps}"
        return steps.pop()


@dataclasses.dataclass(frozen=True)
class Start:
    """Start of a run of a script, in a folder of its own."""

    script: str
    folder: Path
    size: int
    steps: int
    asks_before: int = 0
    """Number of the commit before which all ranks are asked to stop, counted from 1. 0: they are never asked."""
    stops_after: int = 0
    """Number of commits after which all ranks are killed. 0: they are never killed."""
    path: str = ""
    """Folder with Python packages for the script, or ""."""

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LOOP": f"loops.{self.script}",
            "LOOP_FOLDER": str(self.folder),
            "LOOP_STEPS": str(self.steps),
            "LOOP_ASKS_BEFORE": str(self.asks_before),
            "LOOP_STOPS_AFTER": str(self.stops_after),
            "LOOP_PATH": self.path,
            "LOOP_STORE": str(self.folder / "store"),
            "HOME": str(self.folder),
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def all_have(self, done: str) -> bool:
        """Return whether all ranks have written the file `done`, at the commit at which they ask or stop."""
        return all((self.folder / f"{done}-{rank}").exists() for rank in range(self.size))


@contextlib.contextmanager
def running(parent: Parent, start: Start) -> Iterator[None]:
    """Run a script up to the commit where it stops, and kill it at the end of the block."""
    ranks = Running(parent, start)
    try:
        while not ranks.over:
            time.sleep(POLL_SECONDS)
        yield
    finally:
        ranks.kill()
        ranks.ended()


class Agents:
    """Runner of scripts as rounds of a job, one after the other, with a stand-in for its agents."""

    def __init__(self, folder: Path, parent: Parent) -> None:
        self._job = node.Job(folder, parent, {})
        self._job.worker = "loops.run:main"

    def run(self, start: Start) -> tuple[Ran, node.Outcome]:
        """Run one round, which restores the newest snapshot if there is one."""
        start.folder.mkdir(parents=True)
        self._job.environment = start.environment
        restore = self._job.newest() if self._job.number else node.FRESH
        outcome = self._job.run(start.size, restore, node.Script(watch=_ends(start)))
        codes = [outcome.codes[rank] for rank in range(start.size)]
        return read(start.folder, codes, outcome.output), outcome


def _ends(start: Start) -> Callable[[node.Round], None]:
    """Return a function that asks the ranks to stop at their commit, and kills them when they have stopped."""
    asked: list[bool] = []

    def watch(round: node.Round) -> None:
        if start.asks_before and start.all_have("asks") and not asked:
            asked.append(True)
            round.tell_scripts_to_stop()
        if len(round.calls) == start.size:
            (start.folder / "asked").touch()
        if start.stops_after and start.all_have("stops"):
            round.kill()

    return watch


def run(parent: Parent, *starts: Start) -> list[Ran]:
    """Run scripts at the same time, each until its end or until all its ranks are killed."""
    running = [Running(parent, start) for start in starts]
    until = time.monotonic() + GIVE_UP_SECONDS
    try:
        while not all(each.over for each in running):
            assert time.monotonic() < until, "the script does not end"
            if select.select([parent.control], [], [], POLL_SECONDS)[0]:
                parent.hear()
    finally:
        for each in running:
            each.kill()
    return [each.ended() for each in running]


class Running:
    """Processes of all ranks of a run."""

    def __init__(self, parent: Parent, start: Start) -> None:
        start.folder.mkdir(parents=True, exist_ok=True)
        self._parent, self._start = parent, start
        self._log = (start.folder / "log").open("w+b")
        common = {
            **start.environment,
            "WORLD_SIZE": str(start.size),
            "LOCAL_WORLD_SIZE": str(start.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
        self._pids = [
            parent.fork("loops.run:main", {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, self._log.fileno())
            for rank in range(start.size)
        ]
        self._handles = [os.pidfd_open(pid) for pid in self._pids]  # a pid may belong to another process later

    @property
    def over(self) -> bool:
        """Whether the run is over: all ranks have ended, one has failed, or all have made their last commit."""
        codes = [self._parent.codes.get(pid) for pid in self._pids]
        return None not in codes or any(codes) or (self._start.stops_after > 0 and self._start.all_have("stops"))

    def kill(self) -> None:
        for handle in self._handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)

    def ended(self) -> Ran:
        codes = [self._parent.wait(pid) for pid in self._pids]
        for handle in self._handles:
            os.close(handle)
        self._log.seek(0)
        output = self._log.read().decode(errors="replace")
        self._log.close()
        return read(self._start.folder, codes, output)


def read(folder: Path, codes: list[int], output: str) -> Ran:
    ran = Ran(codes, output, [], [], [], [])
    for rank in range(len(codes)):
        steps: dict[int, dict[str, Any]] = {}
        committed: dict[int, dict[str, Any]] = {}
        end: dict[str, Any] = {}
        for kind, content in _records(folder / f"records-{rank}"):
            if kind == "step":
                step, values = content
                items = steps.setdefault(step, {}).get("items", []) + values.get("items", [])
                steps[step].update(values, items=items)
            elif kind == "commit":
                committed[content[0]] = content[1]
            elif kind == "restored":
                ran.restored.append(content)
            else:
                end.update(content)
        ran.steps.append(steps)
        ran.committed.append(committed)
        ran.end.append(end)
    return ran


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    data = path.read_bytes() if path.exists() else b""
    while data:
        size = int.from_bytes(data[:8], "little")
        yield pickle.loads(data[8 : 8 + size])
        data = data[8 + size :]


def left_behind(source: Path, target: Path) -> None:
    """Copy the checkpoints that a run has left in its folder into the folder of another run."""
    target.mkdir(parents=True)
    shutil.copytree(source / "checkpoints", target / "checkpoints")


# --- comparing ------------------------------------------------------------------------------------------------------


def as_saved(first: Ran, then: Ran) -> list[str]:
    """Return the differences between the state that was saved and the state that was restored.

    They must be equal to the bit.

    The saved state is that of the first world, at the commit of the step from which the second world continues. In a
    larger world, a new rank takes the state of rank r modulo the first world's size, but draws other random numbers.
    """
    step = then.restored_step
    saved = [ran.get(step - 1, {}) for ran in first.committed]
    restored = [held for _, held in then.restored]
    if not all(saved):
        return [f"the script continues with step {step}, and step {step - 1} was not committed"]
    differs = []
    for rank, held in enumerate(restored):
        source = rank % first.size
        for name in sorted(saved[source].keys() | held.keys()):
            same = _same_bits(_whole(saved, source, name), _whole(restored, rank, name))
            if name.startswith("random.") and rank >= first.size:
                if name == "random.python" and same:
                    differs.append(f"rank {rank} draws the random numbers of rank {source}")
            elif not same:
                differs.append(f"{name} of rank {rank}")
    return differs


def differences(whole: Ran, first: Ran, then: Ran) -> dict[str, float]:
    """Return the largest relative difference of each result between an uninterrupted run and one that was killed.

    Results are those of the steps before and after the kill, and those at the end of the script. In a world of another
    size, results that each rank has for itself are left out.
    """
    began, same = then.restored_step, whole.size == then.size
    worst: dict[str, float] = {}

    def note(name: str, one: Any, other: Any) -> None:
        worst[name] = max(worst.get(name, 0.0), difference(one, other))

    for step in sorted({step for ran in whole.steps for step in ran}):
        ran = first if step < began else then
        note("items", _items(whole, step), _items(ran, step))
        for rank in range(ran.size):
            expected = whole.steps[rank % whole.size].get(step, {})
            recorded = ran.steps[rank].get(step, {})
            for name in expected.keys() | recorded.keys():
                if name != "items" and (same or not name.startswith("own.")):
                    note(name, expected.get(name), recorded.get(name))
    for rank in range(then.size):
        source = rank % whole.size
        for name in whole.end[source].keys() | then.end[rank].keys():
            if same or not name.startswith(("own.", "end.random.")):
                note(name, _whole(whole.end, source, name), _whole(then.end, rank, name))
    return worst


def _items(ran: Ran, step: int) -> list[int]:
    return sorted(item for rank in ran.steps for item in rank.get(step, {}).get("items", ()))


def _whole(ranks: Sequence[Mapping[str, Any]], rank: int, name: str) -> Any:
    """Return a value of this rank. If each rank has a part of an array, return the whole array."""
    value = ranks[rank].get(name)
    if not isinstance(value, dict) or "part" not in value:
        return value
    whole = numpy.full(value["shape"], numpy.nan)
    for held in ranks:
        part = held[name]
        array = numpy.asarray(part["part"])
        whole[tuple(slice(o, o + n) for o, n in zip(part["offsets"], array.shape, strict=True))] = array
    return whole


def _same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, numpy.ndarray) and isinstance(other, numpy.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same_bits(one[key], other[key]) for key in one)
    return type(one) is type(other) and (one == other or one != one)


def difference(one: Any, other: Any) -> float:
    """Return the largest difference between two values, relative to the largest number.

    The result is infinite if the types or shapes differ.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        return max((difference(one[key], other[key]) for key in one), default=0.0)
    try:
        first, second = numpy.asarray(one), numpy.asarray(other)
    except ValueError:  # the lists have different lengths
        return 0.0 if one == other else numpy.inf
    if first.dtype.kind not in "biufc" or second.dtype.kind not in "biufc" or first.dtype.kind != second.dtype.kind:
        return 0.0 if _same_bits(one, other) else numpy.inf
    if first.shape != second.shape:
        return numpy.inf
    if first.tobytes() == second.tobytes() or not first.size:
        return 0.0
    if first.dtype.kind in "b":
        return numpy.inf
    kind = complex if first.dtype.kind == "c" else float
    first, second = first.astype(kind), second.astype(kind)
    if (numpy.isfinite(first) != numpy.isfinite(second)).any():
        return numpy.inf
    first, second = numpy.nan_to_num(first), numpy.nan_to_num(second)
    largest = max(abs(first).max(), abs(second).max())
    return float(abs(first - second).max() / largest) if largest else 0.0


def outside(worst: Mapping[str, float], bound: float, but: Sequence[str] = ()) -> dict[str, float]:
    """Return the names whose difference exceeds the bound, without those that match a pattern in `but`."""
    return {name: value for name, value in sorted(worst.items()) if value > bound and not matches(name, but)}


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
