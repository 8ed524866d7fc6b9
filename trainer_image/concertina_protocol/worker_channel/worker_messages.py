"""What a worker and its agent say to each other.

The bundled trainer's worker:

    Hello  ->                                   the first line
           <-  Start                            where the state comes from
    (FetchHeader -> FetchedHeader, Fetch -> Fetched)*      only with Restore.source Memory; one at a time
    (Beat | Progress | Committed | WantDurable)*           every step, as they come
           <-  CopiedUpTo*, SaveNow*, TraceSteps*, DrainRequest    at any time
    Done -> and exit 0,  or  Fault -> and a non-zero exit (InvalidInput: 78), each after `WorkerEnd.finish`

A command of one's own may speak too, through the package `trainingjob`: Hello, Progress and Beat as above, and, so that
all ranks stop after the same step without talking to each other:

    Register ->                                 at the first call of should_checkpoint(), which waits for the answer: a
                                                rank that has never called can't slip by
           <-  Registered                       go on
           <-  QueryCalls                       the world is about to end
    CallCount ->                                at once, from the thread that reads; the next call waits
           <-  StopAtCall                       the highest count of all ranks, plus one: none has passed that call, and
                                                each reaches it, as none waits for what another has yet to compute

How a slot that is being shipped is kept from being overwritten: the worker makes a hard link to the committed slot's
file (`WantDurable.path`, beside the slot) before it says WantDurable, and a worker never writes into a file with more
than one name: it puts a new file in the slot's place instead. The agent hands the path to its uploader (`uploader`),
which removes that name when the part is in storage; the agent removes those that it gives up.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional, Tuple, Type, Union

from concertina_protocol import Durable, FailureReason, JobHistory, Progress, Restore, Rollback, SnapshotId
from concertina_protocol.codec.typed_json import OpenEnum

BAD_INPUT_EXIT = 78
"""EX_CONFIG: trying again can't help."""

# --- worker to agent ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hello:
    rank: int
    pid: int
    traces: bool = False
    """It knows TraceSteps, which a worker of an earlier version would fail by."""


@dataclasses.dataclass(frozen=True)
class Beat:
    """Every step from ranks other than 0 (rank 0's is its Progress)."""

    rank: int
    step: int
    phase: str
    """A `heartbeat.WorkerPhase` of those for messages: starting, restoring, training, checkpointing or evaluating."""


@dataclasses.dataclass(frozen=True)
class Committed:
    """The shard file at `path` is whole, and `<path>.json` beside it has its id, shard, size and crc32."""

    id: SnapshotId
    shard: int
    path: str


@dataclasses.dataclass(frozen=True)
class WantDurable:
    """From every rank, after the same step: ship this shard. `path` is a name of its own (see above)."""

    id: SnapshotId
    shard: int
    path: str
    complete: bool = False
    """The run's last step."""


@dataclasses.dataclass(frozen=True)
class FetchHeader:
    """Answered with FetchedHeader: the safetensors header of one shard, from wherever it is held."""

    id: SnapshotId
    shard: int


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Answered with Fetched: one whole shard as a local file, pulled from a peer if need be."""

    id: SnapshotId
    shard: int


class Outcome(OpenEnum):
    COMPLETE = "complete"
    DRAINED = "drained"


@dataclasses.dataclass(frozen=True)
class Done:
    outcome: Outcome
    step: int


@dataclasses.dataclass(frozen=True)
class Fault:
    reason: FailureReason
    """One of BAD_INPUTS (then exit 78), RESTORE_FAILED, or why the world has to roll back."""
    message: str
    rollback: Optional[Rollback] = None


@dataclasses.dataclass(frozen=True)
class Register:
    """From a command of one's own, at its first should_checkpoint(). Answer: Registered, QueryCalls or StopAtCall."""

    rank: int


@dataclasses.dataclass(frozen=True)
class KeepsState:
    """From a command of one's own: it saves snapshots as the bundled trainer does (`trainingjob.State`), so peers are
    to copy them, and the agent is to look after durable storage."""

    rank: int


@dataclasses.dataclass(frozen=True)
class CallCount:
    """Answer to QueryCalls: so many calls of should_checkpoint() are over; the next one waits for StopAtCall."""

    rank: int
    calls: int


# --- agent to worker ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Start:
    restore: Restore
    world: int
    """Workers in all."""
    uid: str
    durable: Optional[Durable] = None
    """What LATEST names, as this agent knows it: a checkpoint that a failure has kept from being finished is then due
    at once. None: nothing that is known of."""
    history: JobHistory = dataclasses.field(default_factory=JobHistory)
    images: Tuple[str, ...] = ()
    """As in Assign."""


@dataclasses.dataclass(frozen=True)
class FetchedHeader:
    header: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Fetched:
    path: str = ""
    """Stays as it is until the worker's round has a snapshot that is complete on peers."""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class DrainRequest:
    """To rank 0 only: stop after the same step; `durable`: and want that snapshot durable."""

    durable: bool


@dataclasses.dataclass(frozen=True)
class SaveNow:
    """To rank 0 only: want the snapshot after the next step durable, and go on."""


@dataclasses.dataclass(frozen=True)
class TraceSteps:
    """To any rank: write a trace of `steps` steps, the first of them `first_step` or the next one, into the volume
    (`concertina_state.step_trace`)."""

    first_step: int
    steps: int
    name: str
    """Of the trace, by which `step_traces.trace_file` is called."""


@dataclasses.dataclass(frozen=True)
class CopiedUpTo:
    """This rank's snapshots up to this step are complete on its peer (sent at once where there is no peer)."""

    step: int


@dataclasses.dataclass(frozen=True)
class Registered:
    """Go on."""


@dataclasses.dataclass(frozen=True)
class QueryCalls:
    """How far are you? The world is about to end."""


@dataclasses.dataclass(frozen=True)
class StopAtCall:
    """should_checkpoint() is to be true at this call, counted from 1, and the one after it ends the process."""

    call: int


Message = Union[
    Hello, Progress, Beat, Committed, WantDurable, FetchHeader, Fetch, Done, Fault,
    Register, KeepsState, CallCount, Start, FetchedHeader, Fetched, DrainRequest, SaveNow, TraceSteps, CopiedUpTo,
    Registered, QueryCalls, StopAtCall,
]  # fmt: skip
KINDS: Dict[str, Type[Any]] = {
    "Hello": Hello, "Progress": Progress, "Beat": Beat, "Committed": Committed, "WantDurable": WantDurable,
    "FetchHeader": FetchHeader, "Fetch": Fetch, "Done": Done, "Fault": Fault, "Attends": Register,
    "KeepsState": KeepsState,
    "Passed": CallCount, "Start": Start, "FetchedHeader": FetchedHeader, "Fetched": Fetched,
    "DrainRequest": DrainRequest, "SaveNow": SaveNow, "TraceSteps": TraceSteps, "CopiedUpTo": CopiedUpTo,
    "Attended": Registered, "AskPassed": QueryCalls, "StopAt": StopAtCall,
}  # fmt: skip
"""By the names that lines have for them: these stay, whatever a class is called."""
