"""Fixtures and hooks for all tests."""

import gc
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Beside other processes, threads that wait for each other take 20 times the processor time. Set this before torch is
# imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from builders import suite
from builders.cluster.drills import FIGURES

# Without bytecode, each process of the suite would compile all tests again, 7 s each time.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Assertions in these modules show what they compare, as in a test.
pytest.register_assert_rewrite("builders.strange", "builders.mutated")
# The time of an example depends more on the machine's load than on the code.
settings.register_profile("concertina", deadline=None, derandomize=suite.SAME_EACH_TIME)
settings.load_profile("concertina")
# A background job of a shell ignores SIGINT, and so do all processes that tests start: Ctrl-C could not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)

BREACHES = pytest.StashKey[list[str]]()
LEFT_OPEN = 150
"""Number of files that the tests of a module may leave open, because later modules share a cluster or a server. A user
may have 1024 by default, for all tests."""


@pytest.hookimpl(tryfirst=True)  # Check this before tests are deselected by their marks or names.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check that each long-only case names its test in the gate, and start the file that takes longest first.

    Raises:
        UsageError: If a case names no such test.
    """
    whole_files = not any("::" in argument for argument in config.args)
    breaches = suite.breaches(map(_case, items)) if whole_files else []
    output = getattr(config, "workeroutput", None)
    if output is None:
        if breaches:
            raise pytest.UsageError("\n".join(breaches))
    elif breaches:  # No test runs here, and the process that started this one says why.
        items.clear()
        output["breaches"] = breaches
    else:
        order = suite.longest_first((item.nodeid for item in items), suite.known())
        items.sort(key=lambda item: order.index(item.nodeid.partition("::")[0]))


def pytest_collection() -> None:
    """Import all tests without the garbage collector, which takes a sixth of the time and frees next to nothing."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _case(item: pytest.Item) -> suite.Case:
    mark = item.get_closest_marker("long")
    return suite.Case(item.nodeid, mark and str(mark.kwargs.get("law", "")))


@pytest.fixture(autouse=True, scope="module")
def few_files_left_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """Name the module that leaves files open, instead of the later one that can't open any."""
    before = _open_files()
    yield
    if len(_open_files()) > len(before) + LEFT_OPEN:
        gc.collect()  # Reference cycles would close their files at some later time.
        left = Counter(_open_files()) - Counter(before)
        assert left.total() <= LEFT_OPEN, f"{request.node.nodeid} leaves {left.total()} files open: {left}"


def _open_files() -> list[str]:
    """Return the targets of this process's file descriptors."""
    targets = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(descriptor.readlink()).partition(":")[0])
        except FileNotFoundError:  # of this very loop
            continue
    return targets


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what was not tried and why, tests that have become slow, and the figures that tests have kept."""
    passed = [report for report in terminalreporter.stats.get("passed", ()) if report.when == "call"]
    took = {report.nodeid: report.duration for report in passed}
    if os.environ.get("CONCERTINA_TIMES") == "write":
        suite.TIMES.write_text(json.dumps(suite.written(suite.known(), took), indent=1) + "\n")
    elif slow := suite.slow(suite.known(), took):
        _section(terminalreporter, f"slower than {suite.TIMES.name} says", slow)
    skipped = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())
    )
    if skipped:  # A line for each, as -rs writes them, would fill the end of the output, where failures are looked for.
        _section(terminalreporter, "skipped", [f"{count}: {reason}" for reason, count in skipped.most_common()])
    if breaches := config.stash.get(BREACHES, []):
        _section(terminalreporter, "long-only cases without their law in the gate", breaches)
    if lines := config.stash.get(FIGURES, []):
        _section(terminalreporter, "figures: of drills, seconds from the blow on; of the simulation, the seeds", lines)


def _section(terminalreporter: pytest.TerminalReporter, title: str, lines: list[str]) -> None:
    terminalreporter.section(title)
    for line in lines:
        terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Pass the figures of a worker process to the process that started it, which prints them."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["figures"] = session.config.stash.get(FIGURES, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})
    node.config.stash.setdefault(FIGURES, []).extend(output.get("figures", []))
    node.config.stash[BREACHES] = output.get("breaches", [])  # The same in each process, which collects all tests.
