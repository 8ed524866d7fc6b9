"""Worker that the kernel killed for lack of memory: it is distinguished from one that was killed otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from concertina_agent.core.events import WorkerExited
from concertina_agent.core.round.failures import worker_failure
from concertina_agent.workers.worker_memory import container_memory, oom_kills

VERSION_1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
VERSION_2 = "low 0\nhigh 0\nmax 31\noom 2\noom_kill 2\noom_group_kill 0\n"


@pytest.mark.parametrize(("text", "kills"), [(VERSION_1, 2), (VERSION_2, 2), ("under_oom 0\n", 0), (None, 0)])
def test_the_kernel_counts_its_kills(tmp_path: Path, text: str | None, kills: int) -> None:
    counter = tmp_path / "counter"
    if text is not None:
        counter.write_text(text)
    assert oom_kills((str(tmp_path / "none"), str(counter))) == kills


@pytest.mark.parametrize(
    ("text", "found"), [("1048576\n", 1 << 20), ("max\n", None), (str(1 << 62), None), (None, None)]
)
def test_a_container_has_as_much_memory_as_its_limit_says_or_the_machine(
    tmp_path: Path, text: str | None, found: int | None
) -> None:
    limit = tmp_path / "limit"
    if text is not None:
        limit.write_text(text)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert container_memory((str(tmp_path / "none"), str(limit))) == (found or machine)


def test_a_failure_says_what_to_do_about_memory() -> None:
    ended = WorkerExited(1, 0, -9, out_of_memory=True)
    failure = worker_failure("a", ended, None, 4, 0.0)
    assert failure.message.startswith("Rank 0 was killed by SIGKILL: the container ran out of memory")
    assert "resources.limits.memory" in failure.message
