"""Parse and create the names of a job's pods. All functions are pure.

The form is <job>-<index>-<attempt>, or <job>-rendezvous-<round> for the pod of torchrun's store.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile("(.+)-([0-9]{1,9})-([0-9]{1,9})|(.+)-rendezvous-([0-9]{1,9})")


@dataclass(frozen=True)
class PodName:
    job: str
    index: int | None
    """Index of the replica; None for the pod that serves torchrun's TCPStore."""
    attempt: int
    """Attempt number of the replica. For the pod of torchrun's store, the number of the round."""


def pod_name(job: str, index: int, attempt: int) -> str:
    return f"{job}-{index}-{attempt}"


def rendezvous_name(job: str, round: int) -> str:
    return f"{job}-rendezvous-{round}"


def parse(name: str) -> PodName | None:
    """Return the parts of a pod's name; None if it is not the name of a job's pod."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    if match[4]:
        return PodName(match[4], None, int(match[5]))
    return PodName(match[1], int(match[2]), int(match[3]))
