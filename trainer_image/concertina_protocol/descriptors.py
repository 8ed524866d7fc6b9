"""Limit on the number of open files and connections of a process.

Containers often start with a soft limit of 1024. The coordinator of a round (the agent of rank 0) has a connection to
each member, and the operator has one to each job's coordinator. Agents and the operator therefore raise their soft
limit to the hard limit.

Processes that an agent starts get the original limit, as with torchrun. Code that uses select() cannot handle a
descriptor above 1023 (decision "The agent raises its limit of open files").
"""

from __future__ import annotations

import contextlib
import resource

MOST = 1 << 20
GIVEN = resource.getrlimit(resource.RLIMIT_NOFILE)
"""Soft and hard limit with which this process was started."""


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard limit, or to MOST if the hard limit is higher."""
    soft, hard = GIVEN
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may not allow it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def as_given() -> None:
    """Restore the limit of open files with which this process was started.

    Call this function in a child process, before the process executes another program.
    """
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, GIVEN)
