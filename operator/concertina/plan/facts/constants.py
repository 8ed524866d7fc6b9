"""Timeouts and delays of plan(), in seconds, and the time elapsed since an event."""

import math

from concertina_protocol import REPORT_SECONDS, SILENCE_SECONDS

PATIENCE = 0.5
"""Seconds to wait for a silent candidate after all other candidates have answered."""
PATIENCE_PLANNED = 2.0
"""PATIENCE for a planned round, where nothing has failed: waiting longer for a slow candidate avoids leaving it out."""
PATIENCE_STATE = 5.0
"""PATIENCE if a connected member may hold newer state than the other candidates.

It is also the longest timeout of a call.
"""
RECONNECT = 0.5
"""Seconds in which a broken stream may be reopened before the operator doubts that the agent is alive."""
UNANSWERED = 1.25
"""Seconds without an answer to this operator after which a member that the coordinator has given up counts as lost.

It is less than SILENCE_SECONDS - DOUBT_SECONDS, so that it has passed when the coordinator gives the member up. It is
more than the longest pause of the operator that goes unnoticed (`agents.stall`), and than the second after which the
kernel repeats the lost first packet of a connection.
"""
FIRST_CONTACT = SILENCE_SECONDS + 1.0
"""Seconds for a new operator to open its first stream to an agent before it doubts that the agent is alive."""
UNHEARD = 30.0
"""Seconds without contact to the coordinator after which the status reports the round as unreachable.

A person may then have to act.
"""
WAITING_BEAT = 5.0
"""Seconds between two reports of an agent whose job waits for its first round."""
UNREACHABLE = SILENCE_SECONDS
"""Seconds without a stream after which a replica that is not in the round is replaced."""
UNREACHABLE_BEFORE = SILENCE_SECONDS / REPORT_SECONDS * WAITING_BEAT
"""Seconds without a stream after which a replica is replaced, before the job's first round.

Longer than UNREACHABLE: the operator notices only after this time that a waiting replica's stream is lost
(`agents.streams.silence`). Until then, other replicas would seem reachable although their connections are lost too.
"""
AGENT_START = 120.0
"""Seconds within which an agent listens after the start of its container."""
AGENT_GIVE_UP = AGENT_START + 15.0
"""Seconds for an agent to start before its replica is given up although the replica itself may not be the cause.

See `startup`.
"""
FIND_AGAIN = 5.0
"""Seconds for a restarted operator to find the candidates of a first round whose claim is already in the status."""
RETRY = 0.5
"""Seconds before a failed call is repeated."""
ACKNOWLEDGE = 3.0
"""Seconds for an agent to answer an Assign call."""
BRIEF_START = 2.0
"""Seconds after a commit in which the status does not report how far the round's start has come.

Most rounds train within this time, and a status write costs the API server 15 ms of processor time.
"""
DRAIN = 30.0
"""Seconds for a round to stop after a step."""
DRAIN_DURABLE = 300.0
"""Seconds for a round to stop after a step and write a checkpoint."""
SAVE = 1.0
"""Seconds for the last snapshot of a drained round, if none has been measured yet."""
SETTLED = 30.0
"""Minimum age in seconds at which a replica outside of the round is replaced because of a notice.

Pods that tolerate the taint may be placed on a tainted node again. The minimum age prevents a fast loop of
replacements.
"""
CREATE_RETRY = 5.0
"""Seconds between attempts to create pods that the API server refused (quota, admission)."""
FIRST_START = 30.0
"""Default number of seconds to wait for all wanted replicas before a job starts with fewer."""
LINGER = 10.0
"""Seconds from the job's end to the deletion of pods that still run.

In that time a client that follows a pod's log receives the end of the log.
"""
END = 600.0
"""Seconds beyond the pod's grace period for a node to stop a pod that failed with its job.

After that time the operator deletes the pod instead. The time is long because the operator itself may have been down.
"""
STEADY = 60.0
"""Seconds between two passes over a job to which nothing happens."""
COUNT_TIME = 60.0
"""Seconds between two updates of the time and cost of a running job whose script reports no progress.

The status of such a job does not change otherwise.
"""
UNSCHEDULED = 5.0
"""Seconds a pod may wait without attention from a scheduler before the status names the scheduler it waits for."""
SLOW_START = 30.0
"""Seconds a pod with a node may report nothing before the status says where to look for the cause."""

STRAGGLER_FACTOR = 2.0
"""Smallest ratio of a rank's own work in a step to the work of the other ranks at which the rank is a straggler.

A busy neighbour process or a hot GPU stays below this ratio. A rank above the ratio is worth a report for any model.
"""


CROWD = 64
"""Number of replicas with which the timeouts for answers (PATIENCE, ACKNOWLEDGE) were measured."""


def crowd(replicas: int) -> float:
    """Return the seconds to add to the timeouts for agents' answers when a job has more than CROWD replicas.

    The operator makes one TLS handshake for each further replica, which takes time.
    """
    return max(0, replicas - CROWD) * 0.02


RELAYED = 4.0
"""Seconds in which an agent that relays calls in a large round may be silent.

The operator then makes the calls itself.
"""


FAULT_LASTS = 30.0
"""Seconds for which a node must have a condition for a fault before its replicas leave: some conditions flap."""
SKEW = 10.0
"""Seconds by which the clocks of two machines, and so of two operators, may differ."""


def since(timestamp: float, now: float) -> float:
    """Return the seconds that have passed since `timestamp`; infinity if `timestamp` is in the future.

    A timestamp in the future means that the clock was set back. With infinity, each timeout that counts from the
    timestamp has passed, so the operator does not wait until the clock reaches that time again.
    """
    seconds = now - timestamp
    return seconds if seconds > -SKEW else math.inf
