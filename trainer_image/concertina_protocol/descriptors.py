"""Limit on the number of files and connections that a process may have open.

Containers often start with a soft limit of 1024. A coordinator has a connection to each member, and an operator has one
to each job's coordinator, so both raise their limit to the hard limit. Processes that an agent starts keep the limit
that the container was given, as under torchrun, because code that uses select() cannot handle a descriptor above 1023
(decision "An agent may open a million files").
"""

from __future__ import annotations

import contextlib
import resource

MOST = 1 << 20
GIVEN = resource.getrlimit(resource.RLIMIT_NOFILE)
"""Soft and hard limit that this process was started with."""


def raise_limit() -> None:
    """Raise the soft limit to the hard limit, at most to MOST."""
    soft, hard = GIVEN
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def as_given() -> None:
    """Restore the original limit in a child process, before it executes another program."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, GIVEN)
