"""Timeouts and delays of plan(), in seconds, and the time elapsed since an event."""

import math

from concertina_protocol import REPORT_SECONDS, SILENCE_SECONDS

PATIENCE = 0.5
"""Seconds to wait for a candidate without an answer after all other candidates for a round have answered."""
PATIENCE_PLANNED = 2.0
"""Value of PATIENCE for a planned round, in seconds.

Nothing has failed then, so a longer wait is better than a start without a slow candidate.
"""
PATIENCE_STATE = 5.0
"""Value of PATIENCE, in seconds, while a connected member may have newer state than the other candidates.

It is also the longest timeout of a call.
"""
RECONNECT = 0.5
"""Seconds in which a broken report stream may be reopened before the operator doubts that the agent is alive."""
UNANSWERED = 1.25
"""Seconds of silence toward this operator after which a member counts as lost, if the coordinator has lost it too.

The value is less than SILENCE_SECONDS - DOUBT_SECONDS, so that this time has passed when the coordinator (the agent of
rank 0) reports the loss. It is longer than the longest pause of the operator that is not detected (`agents.stall`). It
is also longer than one second, after which the kernel repeats a lost first packet of a connection.
"""
FIRST_CONTACT = SILENCE_SECONDS + 1.0
"""Seconds that a new operator has to open its first stream to an agent before it doubts that the agent is alive."""
UNHEARD = 30.0
"""Seconds without contact to the coordinator (the agent of rank 0) after which the status says that it is unreachable.

A person may then have to act.
"""
WAITING_BEAT = 5.0
"""Seconds between two reports of an agent whose job waits for its first round."""
UNREACHABLE = SILENCE_SECONDS
"""Seconds without a report stream after which the operator replaces a replica outside of the round."""
UNREACHABLE_BEFORE = SILENCE_SECONDS / REPORT_SECONDS * WAITING_BEAT
"""Value of UNREACHABLE before the job's first round, in seconds.

It is longer, because agents then report rarely: only after this time does the operator notice that a stream is lost
(`agents.streams.silence`). Until then, other replicas would seem reachable although their connections are lost too.
"""
AGENT_START = 120.0
"""Seconds after the start of its container within which an agent must accept connections."""
AGENT_GIVE_UP = AGENT_START + 15.0
"""Seconds after the start of its container after which a replica without an agent is replaced in any case.

The replica itself may not be the cause. `startup` uses this limit.
"""
FIND_AGAIN = 5.0
"""Seconds for a restarted operator to connect to the candidates of a first round that the status already contains."""
RETRY = 0.5
"""Seconds before a failed call is repeated."""
ACKNOWLEDGE = 3.0
"""Seconds within which an agent must answer an Assign call (which gives it its rank)."""
BRIEF_START = 2.0
"""Seconds after the commit of a round before the status reports the progress of the round's start.

Most rounds train within this time, and a status write costs the API server 15 ms of processor time.
"""
DRAIN = 30.0
"""Seconds within which all ranks of a drained round must stop after the same step."""
DRAIN_DURABLE = 300.0
"""Seconds within which all ranks of a drained round must stop after the same step and write a checkpoint."""
SAVE = 1.0
"""Assumed seconds for the last snapshot of a drained round, until a snapshot has been measured."""
SETTLED = 30.0
"""Minimum age in seconds of a replica outside of the round before it is replaced because of a termination notice.

A pod that tolerates the taint of a node may be placed on that node again. The minimum age prevents a fast loop of
replacements.
"""
CREATE_RETRY = 5.0
"""Seconds between two attempts to create pods that the API server refuses (by a quota or an admission plugin)."""
FIRST_START = 30.0
"""Default number of seconds to wait for all wanted replicas before a job starts with fewer."""
LINGER = 10.0
"""Seconds from the job's end to the deletion of pods that still run.

In that time a client that follows a pod's log receives the end of the log.
"""
END = 600.0
"""Seconds, in addition to the pod's grace period, for a node to stop a pod of a failed job.

After that time, the operator deletes the pod. The time is long because the operator itself may have been down.
"""
STEADY = 60.0
"""Seconds between two planning passes for a job without events."""
COUNT_TIME = 60.0
"""Seconds between two updates of the time and cost of a running job whose script reports no progress.

The status of such a job does not change otherwise.
"""
UNSCHEDULED = 5.0
"""Seconds for which a pod may wait for its first scheduling attempt before the status names its scheduler."""
SLOW_START = 30.0
"""Seconds for which a pod with a node may report nothing before the status says where to look for the cause."""

STRAGGLER_FACTOR = 2.0
"""Smallest ratio of a rank's own work time in a step to that of the other ranks at which the rank is a straggler.

A rank with a busy neighbour process or a hot GPU stays below this ratio. A higher ratio is worth a report for any
model.
"""


CROWD = 64
"""Number of replicas with which the timeouts for answers (PATIENCE, ACKNOWLEDGE) were measured."""


def crowd(replicas: int) -> float:
    """Return the seconds to add to the timeouts for agents' answers when a job has more than CROWD replicas.

    The operator makes one TLS handshake for each further replica, which takes time.
    """
    return max(0, replicas - CROWD) * 0.02


RELAYED = 4.0
"""Seconds for which an agent that passes calls on in a large round may send no answers.

After that, the operator calls the remaining replicas directly.
"""


FAULT_LASTS = 30.0
"""Seconds for which a node must have a fault condition before its replicas leave. Some conditions come and go."""
SKEW = 10.0
"""Seconds by which the clocks of two machines, and so of two operators, may differ."""


def since(timestamp: float, now: float) -> float:
    """Return the seconds that have passed since `timestamp`; infinity if `timestamp` is in the future.

    A timestamp in the future means that the clock was set back. With infinity, each timeout that counts from the
    timestamp has passed, so the operator does not wait until the clock reaches that time again.
    """
    seconds = now - timestamp
    return seconds if seconds > -SKEW else math.inf
