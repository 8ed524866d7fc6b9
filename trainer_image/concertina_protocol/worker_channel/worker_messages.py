"""Messages between a worker and its agent.

The bundled trainer's worker:

    Hello  ->                                   the first line
           <-  Start                            where the state comes from
    (FetchHeader -> FetchedHeader, Fetch -> Fetched)*      only if Restore.source is Memory; one at a time
    (Beat | Progress | Committed | WantDurable)*           in every step
           <-  CopiedUpTo*, SaveNow*, TraceSteps*, DrainRequest    at any time
           <-  ListCalls                        when the round hangs; a thread of the worker answers with CallList
    Done -> and exit 0,  or  Fault -> and a non-zero exit (InvalidInput: 78), each after `WorkerEnd.finish`

If Hello and Start have `stays` set, the worker's process continues in the next round. It exits only when the run is
complete, or after a fault of its own. At the end of any other round, these messages are exchanged. The worker sends
nothing between Left and the next Hello:

           <-  Leave                            the round is over; not sent after Left
    Left ->                                     after Done, after the loss of a rank, or as the answer to Leave
           <-  Enter                            the next round
    Hello ->                                    as above

A user's own command can also use the channel, through the package `trainingjob`. It sends Hello, Progress and Beat as
above, and Left if it calls `trainingjob.run`. The following messages let all ranks stop after the same step without
communicating with each other:

    Register ->                                 at the first call of should_checkpoint(), which waits for the answer,
                                                so that the agent knows every rank that calls
           <-  Registered                       continue
           <-  QueryCalls                       all ranks are about to be stopped
    CallCount ->                                sent at once by the thread that reads; the next call waits
           <-  StopAtCall                       the highest count of all ranks, plus one: no rank has gone beyond that
                                                call, and each rank reaches it, because no rank waits for a result that
                                                another rank has yet to compute

A worker writes snapshots into files (slots) by turns. A slot must not be overwritten while its shard is being uploaded.
The worker therefore creates a hard link to the slot's file before it sends WantDurable (`WantDurable.path`). It never
writes into a file with more than one name, and puts a new file into the slot instead. The agent passes the path of the
link to its uploader, which removes the link when the shard is in storage. The agent removes the links of shards that it
does not upload.

A round is a period in which a fixed set of replicas trains. A snapshot is a copy of the training state in node memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Dict, Optional, Tuple, Type, Union

from concertina_protocol import Durable, FailureReason, GroupCalls, JobHistory, Progress, Restore, Rollback, SnapshotId
from concertina_protocol.codec.typed_json import OpenEnum

ENTERED = "CONCERTINA_ENTERED"
"""Environment variable with the time (`time.perf_counter`) at which a process that existed before became a worker."""
BAD_INPUT_EXIT = 78
"""Exit code EX_CONFIG, by which a worker tells its agent that a retry cannot help."""

# --- worker to agent ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hello:
    """First message of a worker."""

    rank: int
    pid: int
    traces: bool = False
    """True if the worker supports the message TraceSteps. A worker of an earlier version would fail on it."""
    stays: bool = False
    """True if the worker's process can continue in the next round.

    If so, the worker supports the messages Leave and Enter.
    """
    lists_calls: bool = False
    """True if the worker supports the message ListCalls. A worker of an earlier version would fail on it."""


@dataclasses.dataclass(frozen=True)
class CallList:
    """Answer to ListCalls: the collectives of the worker's process groups, from torch's flight recorder."""

    groups: Tuple[GroupCalls, ...]


@dataclasses.dataclass(frozen=True)
class Left:
    """Last message of a worker in a round, if its process continues in the next round.

    A round is a period in which a fixed set of replicas trains. The worker has closed the round's process groups and
    files, so it can no longer change the state of that round.
    """

    round: int
    code: int
    """Exit code that the process would have if it did not continue: 0 after Done, otherwise 1."""
    output: Tuple[str, ...] = ()
    """Last lines of the traceback if the worker has lost a peer."""


@dataclasses.dataclass(frozen=True)
class Beat:
    """Message after every step from all ranks except rank 0, which sends Progress instead."""

    rank: int
    step: int
    phase: str
    """Phase of the worker in words, from `heartbeat.WorkerPhase`: starting, restoring, training, checkpointing or
    evaluating."""


@dataclasses.dataclass(frozen=True)
class Committed:
    """Message that the shard file at `path` is complete.

    `<path>.json` contains the shard's id, number, size and crc32.
    """

    id: SnapshotId
    shard: int
    path: str


@dataclasses.dataclass(frozen=True)
class WantDurable:
    """Request to upload a shard to storage. Each rank sends this request after the same step.

    `path` is a hard link to the shard's file, which the worker has made for this request.
    """

    id: SnapshotId
    shard: int
    path: str
    complete: bool = False
    """True if the shard is of the run's last step."""


@dataclasses.dataclass(frozen=True)
class FetchHeader:
    """Request for the safetensors header of one shard, from any agent that has the shard.

    The answer is FetchedHeader.
    """

    id: SnapshotId
    shard: int


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Request for a whole shard as a local file.

    If necessary, the agent copies the shard from the agent of another replica. The answer is Fetched.
    """

    id: SnapshotId
    shard: int


class Outcome(OpenEnum):
    """Outcome of a worker that has finished its round.

    A round is a period in which a fixed set of replicas trains.
    """

    COMPLETE = "complete"
    DRAINED = "drained"


@dataclasses.dataclass(frozen=True)
class Done:
    """Last message of a worker that has finished, with its outcome."""

    outcome: Outcome
    step: int


@dataclasses.dataclass(frozen=True)
class Fault:
    """Last message of a worker that fails, with the reason and a sentence."""

    reason: FailureReason
    """Reason of the failure.

    It is one of BAD_INPUTS (the worker then exits with 78), RESTORE_FAILED, or a reason for which all ranks must go
    back to an earlier state.
    """
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
    """Message that a user's own command saves snapshots by `trainingjob.State`. The bundled trainer always saves them.

    After this message, another replica copies the snapshots, and the agent uploads checkpoints. A snapshot is a copy of
    the training state in node memory.
    """

    rank: int


@dataclasses.dataclass(frozen=True)
class CallCount:
    """Answer to QueryCalls: the number of finished calls of should_checkpoint().

    The next call of should_checkpoint() waits for StopAtCall.
    """

    rank: int
    calls: int


# --- agent to worker ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Start:
    """First message of the agent to a worker in a round: the source of the state, and other facts about the round.

    A round is a period in which a fixed set of replicas trains.
    """

    restore: Restore
    world: int
    """Number of workers in the world."""
    uid: str
    durable: Optional[Durable] = None
    """Checkpoint that LATEST names, or None if the agent knows of none.

    From the age of this checkpoint, a worker sees that the next one is due, for example after a failure prevented it.
    """
    history: JobHistory = dataclasses.field(default_factory=JobHistory)
    images: Tuple[str, ...] = ()
    """Images of the members' containers, as in Assign."""
    stays: bool = False
    """True if the worker's process continues in the next round, as `Hello.stays` offered.

    An agent of an earlier version does not set this field, and waits until the process exits.
    """


@dataclasses.dataclass(frozen=True)
class Leave:
    """Request to leave this round at once, at any point of a step. The answer is Left.

    A round is a period in which a fixed set of replicas trains.
    """

    round: int


@dataclasses.dataclass(frozen=True)
class Enter:
    """Message to a worker that has left its round: the next round begins. The answer is Hello.

    A round is a period in which a fixed set of replicas trains.
    """

    environment: Mapping[str, str]
    """Environment variables of the worker that change from round to round."""


@dataclasses.dataclass(frozen=True)
class FetchedHeader:
    """Answer to FetchHeader: the shard's header, or an error."""

    header: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Fetched:
    """Answer to Fetch: the path of the shard's local file, or an error."""

    path: str = ""
    """Path of the file.

    The file does not change until the worker's round has a snapshot whose shards are all copied to another replica.
    """
    error: str = ""


@dataclasses.dataclass(frozen=True)
class DrainRequest:
    """Request to rank 0 to stop all ranks after the same step.

    With `durable`, the state of that step becomes a checkpoint.
    """

    durable: bool


@dataclasses.dataclass(frozen=True)
class SaveNow:
    """Request to rank 0 to make the next snapshot a checkpoint, and to continue training.

    A snapshot is a copy of the training state in node memory.
    """


@dataclasses.dataclass(frozen=True)
class TraceSteps:
    """Request to a worker to write a trace of `steps` steps into the volume (see `concertina_state.step_trace`).

    The first traced step is `first_step`, or the next step if `first_step` is in the past.
    """

    first_step: int
    steps: int
    name: str
    """Name of the trace. `step_traces.trace_file` derives the file's name from it."""


@dataclasses.dataclass(frozen=True)
class ListCalls:
    """Request to a worker, in a round that hangs, for the collectives that it has called. The answer is CallList.

    A round is a period in which a fixed set of replicas trains.
    """


@dataclasses.dataclass(frozen=True)
class CopiedUpTo:
    """Message that this rank's shards of snapshots up to a step are copied to another replica.

    A snapshot is a copy of the training state in node memory. If no other replica keeps copies for this one, the agent
    sends the message as soon as a snapshot is committed.
    """

    step: int


@dataclasses.dataclass(frozen=True)
class Registered:
    """Answer to Register: the command may continue."""


@dataclasses.dataclass(frozen=True)
class QueryCalls:
    """Request to a worker, before all ranks are stopped, for the number of finished calls of should_checkpoint().

    The answer is CallCount.
    """


@dataclasses.dataclass(frozen=True)
class StopAtCall:
    """Message that should_checkpoint() must return True at call number `call`, counted from 1.

    The command must then save its state and exit. If the command calls the function once more, the call ends the
    process.
    """

    call: int


Message = Union[
    Hello, Progress, Beat, Committed, WantDurable, FetchHeader, Fetch, Done, Fault,
    Register, KeepsState, CallCount, Start, FetchedHeader, Fetched, DrainRequest, SaveNow, TraceSteps, CopiedUpTo,
    Registered, QueryCalls, StopAtCall, Left, Leave, Enter, ListCalls, CallList,
]  # fmt: skip
KINDS: Dict[str, Type[Any]] = {
    "Hello": Hello, "Progress": Progress, "Beat": Beat, "Committed": Committed, "WantDurable": WantDurable,
    "FetchHeader": FetchHeader, "Fetch": Fetch, "Done": Done, "Fault": Fault, "Attends": Register,
    "KeepsState": KeepsState,
    "Passed": CallCount, "Start": Start, "FetchedHeader": FetchedHeader, "Fetched": Fetched,
    "DrainRequest": DrainRequest, "SaveNow": SaveNow, "TraceSteps": TraceSteps, "CopiedUpTo": CopiedUpTo,
    "Attended": Registered, "AskPassed": QueryCalls, "StopAt": StopAtCall,
    "Left": Left, "Leave": Leave, "Enter": Enter, "ListCalls": ListCalls, "CallList": CallList,
}  # fmt: skip
"""Class of each message, by the name in its lines. A name never changes, even if the class is renamed."""
