"""Messages between a worker and its agent.

The bundled trainer's worker:

    Hello  ->                                   the first line
           <-  Start                            where the state comes from
    (FetchHeader -> FetchedHeader, Fetch -> Fetched)*      only with Restore.source Memory; one at a time
    (Beat | Progress | Committed | WantDurable)*           every step, as they come
           <-  CopiedUpTo*, SaveNow*, TraceSteps*, DrainRequest    at any time
    Done -> and exit 0,  or  Fault -> and a non-zero exit (InvalidInput: 78), each after `WorkerEnd.finish`

A worker lives across rounds if its Hello and the Start say `stays`. It exits only when the run is complete, or after a
fault of its own. Its other rounds end so, and it sends nothing between Left and the next Hello:

           <-  Leave                            the round is over; not sent after Left
    Left ->                                     after Done, after the loss of a peer, or as the answer to Leave
           <-  Enter                            the next round
    Hello ->                                    as above

A user's own command can also use the channel, through the package `trainingjob`. It sends Hello, Progress and Beat as
above, and Left if it calls `trainingjob.run`. The following messages let all ranks stop after the same step without
communicating with each other:

    Register ->                                 at the first call of should_checkpoint(), which waits for the answer,
                                                so that the agent knows every rank that calls
           <-  Registered                       continue
           <-  QueryCalls                       the world is about to end
    CallCount ->                                at once, from the thread that reads; the next call waits
           <-  StopAtCall                       the highest count of all ranks, plus one: no rank has passed that call,
                                                and each reaches it, as none waits for what another has yet to compute

A slot that is being shipped must not be overwritten. So the worker creates a hard link to the committed slot's file
(`WantDurable.path`, beside the slot) before it sends WantDurable, and a worker never writes into a file with more than
one name: it replaces the file in the slot by a new one. The agent passes the path to its uploader (`uploader`), which
removes that name when the part is in storage. The agent removes the names of parts that it does not ship.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Dict, Optional, Tuple, Type, Union

from concertina_protocol import Durable, FailureReason, JobHistory, Progress, Restore, Rollback, SnapshotId
from concertina_protocol.codec.typed_json import OpenEnum

BAD_INPUT_EXIT = 78
"""Exit code EX_CONFIG: a retry cannot help."""

# --- worker to agent ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hello:
    """First message of a worker."""

    rank: int
    pid: int
    traces: bool = False
    """Whether the worker knows TraceSteps, which makes a worker of an earlier version fail."""
    stays: bool = False
    """Whether the process can stay when its round ends, so that it knows Leave and Enter."""


@dataclasses.dataclass(frozen=True)
class Left:
    """Last message of a worker in a round, if its process stays.

    It has closed the groups and files of the round, so nothing of the round changes after it.
    """

    round: int
    code: int
    """Exit code with which a process that does not stay would have ended: 0 after Done, else 1."""
    output: Tuple[str, ...] = ()
    """Last lines of the traceback, if the worker has lost a peer."""


@dataclasses.dataclass(frozen=True)
class Beat:
    """Message after every step from ranks other than 0; rank 0 sends Progress instead."""

    rank: int
    step: int
    phase: str
    """Phase for messages, a `heartbeat.WorkerPhase`: starting, restoring, training, checkpointing or evaluating."""


@dataclasses.dataclass(frozen=True)
class Committed:
    """Message that the shard file at `path` is complete.

    `<path>.json` beside it contains its id, shard, size and crc32.
    """

    id: SnapshotId
    shard: int
    path: str


@dataclasses.dataclass(frozen=True)
class WantDurable:
    """Request from every rank, after the same step, to ship this shard; `path` is a name of its own (see above)."""

    id: SnapshotId
    shard: int
    path: str
    complete: bool = False
    """Whether this is the run's last step."""


@dataclasses.dataclass(frozen=True)
class FetchHeader:
    """Request for the safetensors header of one shard, from any holder; answered with FetchedHeader."""

    id: SnapshotId
    shard: int


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Request for one whole shard as a local file, pulled from a peer if needed; answered with Fetched."""

    id: SnapshotId
    shard: int


class Outcome(OpenEnum):
    """Outcome of a worker that has finished."""

    COMPLETE = "complete"
    DRAINED = "drained"


@dataclasses.dataclass(frozen=True)
class Done:
    """Last message of a worker that has finished."""

    outcome: Outcome
    step: int


@dataclasses.dataclass(frozen=True)
class Fault:
    """Last message of a worker that fails."""

    reason: FailureReason
    """One of BAD_INPUTS (with exit code 78), RESTORE_FAILED, or the reason why the world has to roll back."""
    message: str
    rollback: Optional[Rollback] = None


@dataclasses.dataclass(frozen=True)
class Register:
    """Request from a user's own command at its first call of should_checkpoint().

    The answer is Registered, QueryCalls or StopAtCall.
    """

    rank: int


@dataclasses.dataclass(frozen=True)
class KeepsState:
    """Message from a user's own command that saves snapshots as the bundled trainer does (`trainingjob.State`).

    Peers then copy the snapshots, and the agent manages durable storage.
    """

    rank: int


@dataclasses.dataclass(frozen=True)
class CallCount:
    """Answer to QueryCalls: the number of finished calls of should_checkpoint(); the next one waits for StopAtCall."""

    rank: int
    calls: int


# --- agent to worker ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Start:
    """First message of the agent to a worker."""

    restore: Restore
    world: int
    """Total number of workers."""
    uid: str
    durable: Optional[Durable] = None
    """Checkpoint that LATEST names, as far as this agent knows, or None if it knows of none.

    If a failure has kept a checkpoint from being finished, the worker can see that it is due at once.
    """
    history: JobHistory = dataclasses.field(default_factory=JobHistory)
    images: Tuple[str, ...] = ()
    """Images as in Assign."""
    stays: bool = False
    """Whether the process stays when its round ends, as its Hello offered. An agent of an earlier version waits for
    its exit."""


@dataclasses.dataclass(frozen=True)
class Leave:
    """Request to leave this round at once, from any point of a step; answered with Left."""

    round: int


@dataclasses.dataclass(frozen=True)
class Enter:
    """First message of the agent about the next round to a worker that has left; answered with Hello."""

    environment: Mapping[str, str]
    """Variables of the worker that differ from round to round."""


@dataclasses.dataclass(frozen=True)
class FetchedHeader:
    """Answer to FetchHeader."""

    header: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Fetched:
    """Answer to Fetch."""

    path: str = ""
    """Path of the file, which does not change until the worker's round has a snapshot that is complete on peers."""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class DrainRequest:
    """Request to rank 0 only to stop all ranks after the same step, with a durable snapshot if `durable` is set."""

    durable: bool


@dataclasses.dataclass(frozen=True)
class SaveNow:
    """Request to rank 0 only to make the snapshot after the next step durable, and to continue."""


@dataclasses.dataclass(frozen=True)
class TraceSteps:
    """Request to any rank to write a trace of `steps` steps into the volume (`concertina_state.step_trace`).

    The first traced step is `first_step`, or the next one.
    """

    first_step: int
    steps: int
    name: str
    """Name of the trace, from which `step_traces.trace_file` derives the file's name."""


@dataclasses.dataclass(frozen=True)
class CopiedUpTo:
    """Message that this rank's snapshots up to this step are complete on its peer; sent at once if there is no peer."""

    step: int


@dataclasses.dataclass(frozen=True)
class Registered:
    """Answer to Register: continue."""


@dataclasses.dataclass(frozen=True)
class QueryCalls:
    """Request for the number of calls, because the world is about to end."""


@dataclasses.dataclass(frozen=True)
class StopAtCall:
    """Message that should_checkpoint() returns True at this call, counted from 1; the next call ends the process."""

    call: int


Message = Union[
    Hello, Progress, Beat, Committed, WantDurable, FetchHeader, Fetch, Done, Fault,
    Register, KeepsState, CallCount, Start, FetchedHeader, Fetched, DrainRequest, SaveNow, TraceSteps, CopiedUpTo,
    Registered, QueryCalls, StopAtCall, Left, Leave, Enter,
]  # fmt: skip
KINDS: Dict[str, Type[Any]] = {
    "Hello": Hello, "Progress": Progress, "Beat": Beat, "Committed": Committed, "WantDurable": WantDurable,
    "FetchHeader": FetchHeader, "Fetch": Fetch, "Done": Done, "Fault": Fault, "Attends": Register,
    "KeepsState": KeepsState,
    "Passed": CallCount, "Start": Start, "FetchedHeader": FetchedHeader, "Fetched": Fetched,
    "DrainRequest": DrainRequest, "SaveNow": SaveNow, "TraceSteps": TraceSteps, "CopiedUpTo": CopiedUpTo,
    "Attended": Registered, "AskPassed": QueryCalls, "StopAt": StopAtCall,
    "Left": Left, "Leave": Leave, "Enter": Enter,
}  # fmt: skip
"""Message classes by their names on the wire. These names are stable, even if a class is renamed."""
