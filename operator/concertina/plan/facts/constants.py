"""The waits that plan() knows, in seconds, and how long ago something was."""

import math

from concertina_protocol import REPORT_SECONDS, SILENCE_SECONDS

PATIENCE = 0.5
"""How long one candidate may stay silent after the others have answered."""
PATIENCE_PLANNED = 2.0
"""The same where nothing has failed: a slow one is waited for rather than left out."""
PATIENCE_STATE = 5.0
"""The same where a member that is heard may hold newer state than the others; a call lasts no longer."""
RECONNECT = 0.5
"""For a broken stream to be opened again before its agent is in doubt."""
FIRST_CONTACT = SILENCE_SECONDS + 1.0
"""For a stream that this operator never had open (after a restart) before its agent is in doubt."""
UNHEARD = 30.0
"""A round whose coordinator is not heard for so long is said to be: a person may have to act."""
WAITING_BEAT = 5.0
"""Between two lines of an agent whose job waits for its first round."""
UNREACHABLE = SILENCE_SECONDS
"""A replica outside of the round whose stream is lost for longer is replaced."""
UNREACHABLE_BEFORE = SILENCE_SECONDS / REPORT_SECONDS * WAITING_BEAT
"""The same before the first round: streams of those who wait are lost so late (`agents.streams.silence`), and until
then it would seem that others can be reached."""
AGENT_START = 120.0
"""From a running container to an agent that listens."""
AGENT_GIVE_UP = AGENT_START + 15.0
"""The same where nobody can say that it is this replica's fault (`startup`)."""
FIND_AGAIN = 5.0
"""For an operator that finds the claim of a first round to find its candidates too."""
RETRY = 0.5
"""Before a call that failed is made again."""
ACKNOWLEDGE = 3.0
"""For the answer to an Assign."""
DRAIN = 30.0
"""For a round to stop after a step."""
DRAIN_DURABLE = 300.0
"""The same, with a checkpoint written."""
SAVE = 1.0
"""For a drained round's last snapshot, where nobody has measured one yet."""
SETTLED = 30.0
"""A replica outside of the round with a notice is replaced only this long after it was made: where pods tolerate the
taint, the next one may come to such a node again."""
CREATE_RETRY = 5.0
"""Between attempts to create pods that the API server refused (quota, admission)."""
FIRST_START = 30.0
"""For all wanted replicas before a job that is not told otherwise starts with fewer."""
LINGER = 10.0
"""From the job's end to the deletion of pods that still run: who follows their logs gets the end of them."""
END = 600.0
"""For a node to end a pod that has failed with its job, beyond the pod's grace, before it is deleted instead; the
operator may have been away for a while."""
STEADY = 60.0
"""A look at a job to which nothing happens."""
COUNT_TIME = 60.0
"""Between two counts of the time and the cost of a running job whose status has no other news: its script is silent."""
UNSCHEDULED = 5.0
"""For a pod that no scheduler has looked at, before people are told which one is awaited."""
SLOW_START = 30.0
"""For a pod that has a node and says nothing, before people are told where to look."""

STRAGGLER_FACTOR = 2.0
"""A straggler's own work in a step takes so many times that of the others. A busy neighbour or a warm GPU makes less;
what makes more is worth a word, whatever the model."""


CROWD = 64
"""Replicas with which the waits for answers above were measured."""


def crowd(replicas: int) -> float:
    """Seconds beyond those above for the answers of more replicas than CROWD, a handshake each to begin with."""
    return max(0, replicas - CROWD) * 0.02


RELAYED = 4.0
"""For those to be asked from here whom a silent agent was to ask, of a crowd."""


SKEW = 10.0
"""Seconds by which the clocks of two machines, and so of two operators, may differ."""


def since(at: float, now: float) -> float:
    """Seconds. Without end for what lies ahead: the clock was set back, and nothing may wait for it to get there
    again."""
    seconds = now - at
    return seconds if seconds > -SKEW else math.inf
