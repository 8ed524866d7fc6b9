"""For all tests."""

import signal
from typing import Any

import pytest
from hypothesis import settings

from builders.drills import FIGURES

# What its checks compare is shown, as if it were a test.
pytest.register_assert_rewrite("builders.strange")
# An example's time says more about the machine's load than about the code.
settings.register_profile("concertina", deadline=None)
settings.load_profile("concertina")
# Of a shell's background job SIGINT is ignored, and so by all that tests start: Ctrl-C could not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The figures of the drills that were played: seconds from the blow on."""
    if lines := config.stash.get(FIGURES, []):
        terminalreporter.section("drills: seconds from the blow on")
        for line in lines:
            terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Of a process that runs some of the tests beside others: its figures are told by the one that started it."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["figures"] = session.config.stash.get(FIGURES, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash.setdefault(FIGURES, []).extend(getattr(node, "workeroutput", {}).get("figures", []))
