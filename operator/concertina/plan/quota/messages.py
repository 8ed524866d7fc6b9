"""Preparation of Kueue's messages for a job's status, without the names and uids of other tenants."""

from __future__ import annotations

import re

from concertina.plan.kueue import ConditionName, EvictionReason, WorkloadView

LONGEST = 900
_PREEMPTION = re.compile(r"Preempted to accommodate a workload .*? due to (?P<why>[^;]+)")
_UIDS = re.compile(r" ?\((?:UID|JobUID): [^)]*\)")
_PATHS = re.compile(r"; preempt(?:or|ee) path: [^;]*")
_UNNAMED_PATH = re.compile(r"(?<![\w.])/[\w.\-]+(?:/[\w.\-]+)+")


def public(message: str) -> str:
    """Return a message of Kueue without the uids of other Workloads and the paths of queues, for the job's status.

    Users of the job may not see the names and uids of other tenants.
    """
    if match := _PREEMPTION.search(message):
        return f"preempted for another workload ({match['why'].strip()})"
    return _UNNAMED_PATH.sub("", _PATHS.sub("", _UIDS.sub("", message))).strip()[:LONGEST]


def why_waiting(workload: WorkloadView) -> str:
    """Return why a Workload is not admitted, mostly in the words of Kueue's conditions."""
    if not workload.active:
        return "its Workload is deactivated"
    if workload.reserved:
        checks = "; ".join(workload.check_messages)
        return (
            public(checks or workload.condition(ConditionName.ADMITTED).message) or "its admission checks are pending"
        )
    condition = workload.condition(ConditionName.QUOTA_RESERVED)
    return public(condition.message) or "Kueue has not considered it yet"


def why_evicted(workload: WorkloadView) -> str:
    """Return why Kueue takes the Workload's quota back, as a clause to put after a colon."""
    condition = workload.condition(ConditionName.EVICTED)
    if condition.reason == EvictionReason.PREEMPTED:
        return public(condition.message)
    return f"{condition.reason}: {public(condition.message)}" if condition.message else condition.reason
