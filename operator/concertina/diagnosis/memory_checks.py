"""Whether the workers' memory grows, by three looks or more at the agents' metrics."""

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


def memory_grows(seen: JobEvidence) -> Finding | None:
    """The replica whose memory will be used up first."""
    growing = []
    for replica, figures in itertools.groupby(sorted(seen.agents, key=_order), key=lambda one: one.replica):
        looks = [one for one in figures if one.worker_bytes]
        if (hours := _hours_left(looks, _limit(seen))) is not None and hours <= MEMORY_HOURS:
            growing.append((hours, replica, looks))
    if not growing:
        return _out_of_memory(seen)
    hours, replica, looks = min(growing)
    first, last = looks[0].worker_bytes or 0.0, looks[-1].worker_bytes or 0.0
    limit = _limit(seen)
    end = f"the limit of {limit / MIB:.0f} MiB is reached" if limit else "it is twice that"
    return warning(
        Problem.MEMORY_GROWS,
        f"the workers' memory in {replica} grew from {first / MIB:.0f} to {last / MIB:.0f} MiB in "
        f"{looks[-1].at - looks[0].at:.0f} s, and in each look between; at this rate {end} in {hours * 60:.0f} min"
        + (f" ({len(growing)} replicas grow)" if len(growing) > 1 else ""),
        ADVICE[Problem.MEMORY_GROWS],
    )


def _order(figures: AgentFigures) -> tuple[str, float]:
    return figures.replica, figures.at


def _hours_left(looks: Sequence[AgentFigures], limit: int) -> float | None:
    """Until all is used; None where it does not grow from each look to the next."""
    sizes = [one.worker_bytes or 0.0 for one in looks]
    if len(sizes) < FEWEST_LOOKS or any(after <= before for before, after in itertools.pairwise(sizes)):
        return None
    grown = sizes[-1] - sizes[0]
    if grown < MEMORY_GREW * sizes[0]:
        return None
    left = (limit or 2 * sizes[-1]) - sizes[-1]
    return max(0.0, left) / grown * (looks[-1].at - looks[0].at) / 3600


def _limit(seen: JobEvidence) -> int:
    """Of the container's memory, in bytes; 0 without one."""
    container = seen.spec.template.trainer if seen.spec else None
    limits = amounts_of(container.model_extra or {}, "limits") if container else {}
    return bytes_of(limits.get("memory"))


def _out_of_memory(seen: JobEvidence) -> Finding | None:
    news = [
        one for one in seen.status.restarts.recent if one.reason == "OutOfMemory" and seen.age(one.at) <= RECENT_SECONDS
    ]
    if not news:
        return None
    where = f"{news[-1].replica} on {news[-1].node}" if news[-1].node else news[-1].replica
    return critical(
        Problem.MEMORY_GROWS,
        f"{len(news)} times in the last hour a replica ran out of memory, last {where} at step {news[-1].step}",
        ADVICE[Problem.MEMORY_GROWS],
        lost=0.0,
    )
