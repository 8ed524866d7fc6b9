"""Timeouts and delays of plan(), in seconds, and the time elapsed since an event."""

import math

from concertina_protocol import REPORT_SECONDS, SILENCE_SECONDS

PATIENCE = 0.5
"""Time that a candidate may stay silent after all other candidates have answered."""
PATIENCE_PLANNED = 2.0
"""PATIENCE if nothing has failed: a slow candidate is waited for rather than left out."""
PATIENCE_STATE = 5.0
"""PATIENCE if a connected member may hold newer state than the other candidates. A call lasts no longer."""
RECONNECT = 0.5
"""Time for a broken stream to be reopened before its agent is in doubt."""
FIRST_CONTACT = SILENCE_SECONDS + 1.0
"""Time for a stream that this operator never had open (after a restart) before its agent is in doubt."""
UNHEARD = 30.0
"""Time without contact to its coordinator after which a round is reported as unreachable, because a person may have to
act."""
WAITING_BEAT = 5.0
"""Time between two reports of an agent whose job waits for its first round."""
UNREACHABLE = SILENCE_SECONDS
"""Time without a stream after which a replica outside of the round is replaced."""
UNREACHABLE_BEFORE = SILENCE_SECONDS / REPORT_SECONDS * WAITING_BEAT
"""The same before the first round.

The loss of a waiting replica's stream is noticed only after this time (`agents.streams.silence`). Until then, other
replicas would seem reachable although their connections are lost too.
"""
AGENT_START = 120.0
"""Time from a running container to an agent that listens."""
AGENT_GIVE_UP = AGENT_START + 15.0
"""The same if nothing shows that it is this replica's fault (`startup`)."""
FIND_AGAIN = 5.0
"""Time for an operator that was just started, and finds the claim of a first round, to find the candidates too."""
RETRY = 0.5
"""Time before a failed call is repeated."""
ACKNOWLEDGE = 3.0
"""Time for the answer to an Assign."""
DRAIN = 30.0
"""Time for a round to stop after a step."""
DRAIN_DURABLE = 300.0
"""Time for a round to stop after a step and write a checkpoint."""
SAVE = 1.0
"""Time for a drained round's last snapshot, if none has been measured yet."""
SETTLED = 30.0
"""Minimum age of a replica outside of the round before a notice causes its replacement. If pods tolerate the taint, the
successor may be placed on such a node again."""
CREATE_RETRY = 5.0
"""Time between attempts to create pods that the API server refused (quota, admission)."""
FIRST_START = 30.0
"""Default time to wait for all wanted replicas before a job starts with fewer."""
LINGER = 10.0
"""Time from the job's end to the deletion of pods that still run, so that a client that follows their logs gets the end
of them."""
END = 600.0
"""Time beyond the pod's grace for a node to end a pod that has failed with its job. After that the pod is deleted
instead. The operator may have been away for a while."""
STEADY = 60.0
"""Time between two passes over a job to which nothing happens."""
COUNT_TIME = 60.0
"""Time between two counts of the time and the cost of a running job whose script reports nothing, so that the status
does not change otherwise."""
UNSCHEDULED = 5.0
"""Time for a pod that no scheduler has looked at, before the status says which scheduler is awaited."""
SLOW_START = 30.0
"""Time for a pod that has a node and reports nothing, before the status says where to look."""

STRAGGLER_FACTOR = 2.0
"""Ratio of a straggler's own work in a step to the work of the other ranks. A busy neighbour or a warm GPU stays below
it, and any rank above it is worth a report for any model."""


CROWD = 64
"""Number of replicas with which the timeouts for answers above were measured."""


def crowd(replicas: int) -> float:
    """Return the seconds to add to the timeouts above for the answers of more replicas than CROWD.

    Each of those replicas needs a handshake first.
    """
    return max(0, replicas - CROWD) * 0.02


RELAYED = 4.0
"""Time that a silent agent has to relay calls in a large round. The operator then makes the relayed calls itself."""


SKEW = 10.0
"""Seconds by which the clocks of two machines, and so of two operators, may differ."""


def since(timestamp: float, now: float) -> float:
    """Return the seconds since a time; infinity for a time in the future.

    A time in the future means that the clock was set back, and nothing may wait for the clock to get there again.
    """
    seconds = now - timestamp
    return seconds if seconds > -SKEW else math.inf
