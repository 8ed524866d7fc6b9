"""Conclusions from messages of the scheduler and of quotas: whether a pod would fit if other pods ended.

Pure functions. The patterns match the messages of kube-scheduler (FitError and the plugins' reasons) and of
ResourceQuota in Kubernetes 1.36 and some earlier versions. Other messages are treated as unknown.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from decimal import Decimal

from concertina_protocol.quantities import parse_quantity

_NODES = re.compile(r"0/(\d+) nodes are available: (.+?)\.(?: |$)")
_WHOLE_NODES = re.compile(
    r"preemption: 0/(?P<nodes>\d+) nodes are available: (?P=nodes) Preemption is not helpful for scheduling\."
)
_WHATEVER_RUNS = re.compile(
    r"node\(s\) (didn't match Pod's node affinity/selector|didn't match scheduler-enforced node affinity"
    r"|didn't satisfy plugin\(s\) \[NodeAffinity\]|didn't match the requested node name"
    r"|had untolerated taint(\(s\)| \{.*\})|were unschedulable)"
)
"""Reasons of the scheduler against a node that do not depend on other pods on the node."""
_RESOURCES = re.compile(r"Insufficient \S+|Too many pods")
_QUOTA = re.compile(r'pods "[^"]*" is forbidden: exceeded quota: [^,]+, requested: (\S+), used: \S+, limited: (\S+)')


def excluded(message: str) -> bool:
    """Return whether the pod would fit on no node, even if no other pods ran.

    This is the case if each node is excluded by rules such as taints or affinity, or if the pod requests more than a
    whole node has. In the second case, the scheduler's message says that only resources are lacking and that preemption
    would not help. For claimed devices, the message is the same even if another pod could release the devices. If a
    device is lacking, the result is therefore False.

    Args:
        message: Message of the pod's condition PodScheduled.
    """
    match = _NODES.match(message)
    if match is None:
        return False
    reasons = [reason.partition(" ")[2] for reason in re.split(r", (?=\d+ )", match[2])]
    others = [reason for reason in reasons if not _WHATEVER_RUNS.fullmatch(reason)]
    return not others or (
        all(_RESOURCES.fullmatch(reason) for reason in others) and _WHOLE_NODES.search(message) is not None
    )


def fits_quota(message: str) -> int | None:
    """Return how many pods like the refused pod a resource quota allows in total.

    The result is None if `message` is not about a resource quota.
    """
    match = _QUOTA.search(message)
    if match is None:
        return None
    try:
        requested, limited = (amounts(dict(pair.split("=") for pair in text.split(","))) for text in match.groups())
        return min(int(limited[name] // requested[name]) for name in requested)
    except (KeyError, ValueError, ArithmeticError):
        return None  # possibly the message of a webhook


def amounts(quantities: Mapping[str, object]) -> Mapping[str, Decimal]:
    """Return the amounts of resources as numbers.

    To save memory, the same object is returned for equal arguments: pods of a job have the same amounts, and so have
    nodes of one type.
    """
    return _amounts(tuple((name, str(quantity)) for name, quantity in quantities.items()))


@functools.lru_cache(maxsize=8192)
def _amounts(quantities: tuple[tuple[str, str], ...]) -> Mapping[str, Decimal]:
    return {name: parse_quantity(quantity) for name, quantity in quantities}
