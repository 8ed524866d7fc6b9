"""Cases of scripts of tests/programs/loops: how each is started, and what is expected once it is restored."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Callable
from pathlib import Path

from builders.train import killed
from builders.train.killed import Ran, Start
from builders.train.node import Parent

NEAR = 1e-5
"""Tolerance between worlds of different sizes, whose sums are in another order."""


@dataclasses.dataclass(frozen=True)
class Equal:
    """The run equals an uninterrupted one."""

    bound: float = 0.0
    """The largest difference allowed, relative to the largest number."""
    why: str = ""
    """The reason for a bound above 0."""


@dataclasses.dataclass(frozen=True)
class Differs:
    """Some results differ, for a reason that State can not change; the others are equal."""

    why: str
    names: tuple[str, ...]
    """Patterns of the names that differ."""
    bound: float = NEAR


@dataclasses.dataclass(frozen=True)
class Refused:
    """The script ends with an error that names what can not be kept."""

    match: str


Expected = Equal | Differs | Refused
ERROR = r"^(?:[\w.]+\.)?(?:InvalidInput|NotSavable|Unsaveable): .*$"
"""The last line of a script that was refused."""


@dataclasses.dataclass(frozen=True)
class Case:
    script: str
    same: Expected = Equal()
    """The result in a world of the same size."""
    other: Expected = Equal(NEAR)
    """The result in a world of another size."""
    first: int = 2
    others: tuple[int, ...] = (3, 1)
    """Sizes of other worlds; the gate has the first of them."""
    steps: int = 12
    kill: int = 5
    """The number of commits after which all ranks are killed."""
    kills: tuple[int, ...] = (1, 9)
    """More such numbers, for the long suite."""
    saved: Callable[[int], int] = lambda commits: commits
    """The step that a run continues with, after so many commits."""
    not_compared: tuple[str, ...] = ()
    """Patterns of names: of clocks, and of what an object says otherwise until its loop goes on."""
    sibling: str = ""
    """A script of the same kind, which the gate has: this one is for the long suite."""
    parent: str = "loops.preload"
    package: str = ""
    """A package that the script imports: without it the test is skipped."""
    path: str = ""
    """The folder of that package."""

    @property
    def id(self) -> str:
        return self.script.replace("_", "-")


def killed_and_started_again(folder: Path, parent: Parent, case: Case, kill: int, sizes: tuple[int, ...]) -> None:
    whole = Start(case.script, folder / "whole", case.first, case.steps, path=case.path)
    first = dataclasses.replace(whole, folder=folder / "first", stops_after=kill)
    uninterrupted, before = killed.run(parent, whole, first)
    if isinstance(case.same, Refused) and before.failed:
        check_refused(case.same, before)
        return
    assert not any(uninterrupted.codes), uninterrupted.output
    assert set(before.codes) == {-signal.SIGKILL}, before.output
    again = [dataclasses.replace(whole, folder=folder / f"then-{size}", size=size) for size in sizes]
    for start in again:
        killed.left_behind(first.folder, start.folder)
    for after in killed.run(parent, *again):
        expected = case.same if after.size == case.first else case.other
        if isinstance(expected, Refused):
            check_refused(expected, after)
        else:
            assert not any(after.codes), after.output
            check(case, expected, uninterrupted, before, after, case.saved(kill))


def check(case: Case, expected: Equal | Differs, whole: Ran, before: Ran, after: Ran, restored: int) -> None:
    assert after.restored_step == restored, f"it continues with step {after.restored_step}, not {restored}"
    check_log(after, before.size)
    unlike = [name for name in killed.as_saved(before, after) if not killed.matches(name, case.not_compared)]
    assert not unlike, f"restored it is not what was saved: {unlike}"
    worst = killed.differences(whole, before, after)
    if isinstance(expected, Differs):
        assert killed.outside(worst, expected.bound), f"nothing differs: {expected.why}"
        ignored = (*case.not_compared, *expected.names)
    else:
        ignored = case.not_compared
    unequal = killed.outside(worst, expected.bound, ignored)
    assert not unequal, f"not as in an uninterrupted run: {unequal}"


def check_log(ran: Ran, saved_size: int) -> None:
    """Check that the log names the rank from which each new rank takes its own values, and the first one left out."""
    sources = dict(re.findall(r"rank (\d+) is new, and takes what .* from rank-(\d+), but for random", ran.output))
    assert sources == {str(rank): str(rank % saved_size) for rank in range(saved_size, ran.size)}, ran.output
    left_out = re.findall(r"what each rank from rank-(\d+) on had for itself .* is left out", ran.output)
    assert left_out == ([str(ran.size)] if ran.size < saved_size else []), ran.output


def check_refused(expected: Refused, ran: Ran) -> None:
    """Check that the script ended with an error of State, and not a raw one."""
    assert ran.failed, "nothing was refused"
    errors = re.findall(ERROR, ran.output, re.MULTILINE)
    assert any(re.search(expected.match, error) for error in errors), ran.output
