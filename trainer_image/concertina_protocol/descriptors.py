"""How many files and connections a process may have open at a time.

Containers often start with a soft limit of 1024. A coordinator has a connection of each member, and an operator of each
job's coordinator, so both take what the hard limit allows. What an agent starts has the limit that the container was
given, as under torchrun: code that uses select() can't have a descriptor above 1023 (decision "An agent may open a
million files").
"""

from __future__ import annotations

import contextlib
import resource

MOST = 1 << 20
GIVEN = resource.getrlimit(resource.RLIMIT_NOFILE)
"""Soft and hard, as this process was started with."""


def raise_limit() -> None:
    soft, hard = GIVEN
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def as_given() -> None:
    """In a child, before it becomes another program."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, GIVEN)
