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
"""Tolerance between worlds of different sizes, which add numbers in different orders."""


@dataclasses.dataclass(frozen=True)
class Equal:
    """Expectation that a killed and restored run equals an uninterrupted one."""

    bound: float = 0.0
    """Largest difference that is allowed, relative to the largest number."""
    why: str = ""
    """Reason for a bound above 0."""


@dataclasses.dataclass(frozen=True)
class Differs:
    """Expectation that some results differ, for a reason that State can't change. All other results are equal."""

    why: str
    names: tuple[str, ...]
    """Patterns of the names of the results that differ."""
    bound: float = NEAR


@dataclasses.dataclass(frozen=True)
class Refused:
    """Expectation that the script ends with an error that names what can't be restored."""

    match: str


Expected = Equal | Differs | Refused
ERROR = r"^(?:[\w.]+\.)?(?:InvalidInput|NotSavable|Unsaveable): .*$"
"""Pattern of the last line of a script that ended with such an error."""


@dataclasses.dataclass(frozen=True)
class Case:
    script: str
    same: Expected = Equal()
    """Expected result in a world of the same size."""
    other: Expected = Equal(NEAR)
    """Expected result in a world of another size."""
    first: int = 2
    others: tuple[int, ...] = (3, 1)
    """Sizes of the other worlds. The gate uses only the first of them."""
    steps: int = 12
    kill: int = 5
    """Number of commits after which all ranks are killed."""
    kills: tuple[int, ...] = (1, 9)
    """More numbers of commits after which all ranks are killed, for the long suite."""
    saved: Callable[[int], int] = lambda commits: commits
    """Function that returns the step from which a run continues, given the number of commits before the kill."""
    not_compared: tuple[str, ...] = ()
    """Patterns of names that are not compared: clocks, and values that an object restores only when its loop
    continues."""
    sibling: str = ""
    """Similar script that the gate runs. If it is set, this script is for the long suite."""
    parent: str = "loops.preload"
    package: str = ""
    """Package that the script imports, or "". Without this package, the test is skipped."""
    path: str = ""
    """Folder that contains the package, or ""."""

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
    """Check what the log says about the ranks of a world of another size.

    It must name the rank from which each new rank takes its own values, and the first rank that is left out.
    """
    sources = dict(
        re.findall(r"rank (\d+) is new, and starts with the own .* of rank-(\d+), without the random", ran.output)
    )
    assert sources == {str(rank): str(rank % saved_size) for rank in range(saved_size, ran.size)}, ran.output
    left_out = re.findall(r"the own values .* of each rank from rank-(\d+) on are left out", ran.output)
    assert left_out == ([str(ran.size)] if ran.size < saved_size else []), ran.output


def check_refused(expected: Refused, ran: Ran) -> None:
    """Check that the script ended with an error of State, and not with an error of a library."""
    assert ran.failed, "nothing was refused"
    errors = re.findall(ERROR, ran.output, re.MULTILINE)
    assert any(re.search(expected.match, error) for error in errors), ran.output
