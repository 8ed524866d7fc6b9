"""Check of whether the memory of workers grows, from at least three readings of the agents' metrics."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from concertina.api.quantity_fields import amounts_of, bytes_of
from concertina.diagnosis.evidence import RECENT_SECONDS, AgentFigures, JobEvidence
from concertina.diagnosis.failure_checks import ADVICE
from concertina.diagnosis.finding import Finding, critical, warning
from concertina.diagnosis.problems import MEMORY_GREW, MEMORY_HOURS, Problem

FEWEST_LOOKS = 3
MIB = 1 << 20


def memory_grows(evidence: JobEvidence) -> Finding | None:
    """Check whether the workers' memory on any replica grows so that it will soon reach its limit.

    The finding reports the replica that will reach its limit first.
    """
    growing = []
    for replica, figures in itertools.groupby(sorted(evidence.agents, key=_order), key=lambda reading: reading.replica):
        readings = [reading for reading in figures if reading.worker_bytes]
        if (hours := _hours_left(readings, _limit(evidence))) is not None and hours <= MEMORY_HOURS:
            growing.append((hours, replica, readings))
    if not growing:
        return _out_of_memory(evidence)
    hours, replica, readings = min(growing)
    first, last = readings[0].worker_bytes or 0.0, readings[-1].worker_bytes or 0.0
    limit = _limit(evidence)
    end = f"the limit of {limit / MIB:.0f} MiB is reached" if limit else "it is twice that"
    return warning(
        Problem.MEMORY_GROWS,
        f"the workers' memory in {replica} grew from {first / MIB:.0f} to {last / MIB:.0f} MiB in "
        f"{readings[-1].at - readings[0].at:.0f} s, and at each reading in between; at this rate {end} in "
        f"{hours * 60:.0f} min" + (f" ({len(growing)} replicas grow)" if len(growing) > 1 else ""),
        ADVICE[Problem.MEMORY_GROWS],
    )


def _order(figures: AgentFigures) -> tuple[str, float]:
    return figures.replica, figures.at


def _hours_left(readings: Sequence[AgentFigures], limit: int) -> float | None:
    """Return the hours until a replica's memory reaches `limit`.

    The result is None if the memory does not grow between all consecutive readings.
    """
    sizes = [reading.worker_bytes or 0.0 for reading in readings]
    if len(sizes) < FEWEST_LOOKS or any(after <= before for before, after in itertools.pairwise(sizes)):
        return None
    grown = sizes[-1] - sizes[0]
    if grown < MEMORY_GREW * sizes[0]:
        return None
    remaining_bytes = (limit or 2 * sizes[-1]) - sizes[-1]
    return max(0.0, remaining_bytes) / grown * (readings[-1].at - readings[0].at) / 3600


def _limit(evidence: JobEvidence) -> int:
    """Return the container's memory limit in bytes, or 0 without a limit."""
    container = evidence.spec.template.trainer if evidence.spec else None
    limits = amounts_of(container.model_extra or {}, "limits") if container else {}
    return bytes_of(limits.get("memory"))


def _out_of_memory(evidence: JobEvidence) -> Finding | None:
    recent_restarts = [
        restart
        for restart in evidence.status.restarts.recent
        if restart.reason == "OutOfMemory" and evidence.age(restart.at) <= RECENT_SECONDS
    ]
    if not recent_restarts:
        return None
    last = recent_restarts[-1]
    origin = f"{last.replica} on {last.node}" if last.node else last.replica
    return critical(
        Problem.MEMORY_GROWS,
        f"{len(recent_restarts)} times in the last hour a replica ran out of memory, last {origin} at step {last.step}",
        ADVICE[Problem.MEMORY_GROWS],
        lost=0.0,
    )
