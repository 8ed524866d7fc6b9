"""What the operator and the agents say to each other, and what an agent may be in. The messages themselves are in
`messages`; an agent and the processes of its own replica speak over `worker_channel`.

Standard library only and Python 3.9+. Without asyncio but for `connection`, `waiting` and `worker_channel.agent_end`:
workers and people's scripts import the rest.

The wire: TLS with the job's own CA, one JSON object a line, at most MAX_LINE bytes (`connection`). A connection carries
one request after another; the answer is one line, or for `Watch` and `Join` a line whenever something changes and at
least every REPORT_SECONDS or BEAT_SECONDS. On a connection that carries a `Watch`, where the Report has `takes_calls`,
Prepare, Assign, Drain and Save are answered in their order, between the lines of the stream.
A line is {"v": VERSION, "kind": name in KINDS, "body": fields} (`lines`). One version more or less than one's own is
understood, for agents run on while their operator is upgraded: unknown fields are ignored, new ones have defaults,
and a state of which only a newer side knows is none of those known here (`typed_json.OpenEnum`).

Who may ask what (checked against the certificate's name): the operator `<uid>.operator` alone may send Drain, Save and
Relay; agents `<uid>.agent` may send each other Ping, Join, Index, Pull and Learn; and both Watch, which is how
`concertina-agent report` asks, and Prepare and Assign, which agents pass on (decision "Agents pass on what the operator
says").

The states of an agent are `concertina_agent.core.states`: idle -> prepared (Prepare) -> running (Assign) -> one of
drained, succeeded and failed, and back to prepared from all of them with the Prepare of a higher round, and by nothing
else. A new start of an agent is a new instance id; the highest (round, claim) ever seen is read back from its volume.

Rules, each enforced by the agent's core and asserted by the simulation:
- Prepare or Assign of a round lower than the highest seen is refused, and so is the same round under another claim.
- Prepare kills the workers of every older round before it is answered. The same Prepare again gets the same answer.
- Assign is accepted only for the prepared (round, claim) and only if the instance id named for this agent is its own.
  The same Assign again is acknowledged without starting anything twice.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any, Union

from concertina_protocol.codec.lines import JsonLines
from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.messages.operator_calls import (
    Accepted,
    Assign,
    Drain,
    JobHistory,
    Limits,
    Prepare,
    Prepared,
    Refused,
    Relay,
    Relayed,
    Save,
    Watch,
)
from concertina_protocol.messages.peers import (
    Copied,
    DurableMoved,
    Index,
    Join,
    Learn,
    Learned,
    Ping,
    Pull,
    ShardHeader,
    StopAt,
    Trace,
)
from concertina_protocol.messages.records import (
    Candidate,
    Durable,
    HeldSnapshot,
    Member,
    Restore,
    RestoreSource,
    Rollback,
    SnapshotId,
    State,
    Storage,
    StorageHealth,
)
from concertina_protocol.messages.report_changes import ReportChange, change, changed, only_numbers
from concertina_protocol.messages.reports import (
    BAD_INPUTS,
    COMMUNICATION,
    LONGEST_LAST_LINE,
    MOST_LAST_LINES,
    MOST_METRICS,
    Busy,
    CheckpointInterval,
    Evaluated,
    Failure,
    FailureReason,
    Hang,
    Heartbeat,
    MemberState,
    Part,
    Progress,
    Report,
    SnapshotInterval,
    StepPart,
    Straggler,
)
from concertina_protocol.messages.undone import Undone

__all__ = [
    "BAD_INPUTS",
    "BEAT_SECONDS",
    "COMMUNICATION",
    "EXIT_OLD_PYTHON",
    "KINDS",
    "LONGEST_LAST_LINE",
    "MAX_LINE",
    "MOST_LAST_LINES",
    "MOST_METRICS",
    "PORT",
    "REPORT_SECONDS",
    "SILENCE_SECONDS",
    "VERSION",
    "Accepted",
    "Assign",
    "Busy",
    "Candidate",
    "CheckpointInterval",
    "Copied",
    "Drain",
    "Durable",
    "DurableMoved",
    "Evaluated",
    "Failure",
    "FailureReason",
    "Hang",
    "Heartbeat",
    "HeldSnapshot",
    "Index",
    "JobHistory",
    "Join",
    "Learn",
    "Learned",
    "Limits",
    "Member",
    "MemberState",
    "Message",
    "Part",
    "Ping",
    "Prepare",
    "Prepared",
    "Progress",
    "ProtocolError",
    "Pull",
    "Refused",
    "Relay",
    "Relayed",
    "Report",
    "ReportChange",
    "Restore",
    "RestoreSource",
    "Rollback",
    "Save",
    "ShardHeader",
    "SnapshotId",
    "SnapshotInterval",
    "State",
    "StepPart",
    "StopAt",
    "Storage",
    "StorageHealth",
    "Straggler",
    "Trace",
    "Undone",
    "Watch",
    "change",
    "changed",
    "decode",
    "encode",
    "only_numbers",
]

VERSION = 1
PORT = 29400
"""The agent's TCP port, where the pod does not say otherwise (CONCERTINA_PORT)."""
EXIT_OLD_PYTHON = 69
"""Of an agent that was started by a Python older than 3.9."""
MAX_LINE = 4 * 1024 * 1024
BEAT_SECONDS = 0.5
REPORT_SECONDS = 1.0
"""Between two lines to the operator, where nothing is new."""
SILENCE_SECONDS = 3.0
"""A stream without a line for this long is lost."""

Message = Union[
    Prepare, Prepared, Assign, Drain, Save, Accepted, Refused, Watch, Join, DurableMoved, StopAt, Ping, Index, Pull,
    ShardHeader, Copied, MemberState, Report, ReportChange, Relay,
    Relayed, Learn, Learned, Trace,
]  # fmt: skip
KINDS: dict[str, type[Any]] = {
    "Prepare": Prepare, "Prepared": Prepared, "Assign": Assign, "Drain": Drain, "Save": Save,
    "Accepted": Accepted, "Refused": Refused, "Watch": Watch, "Join": Join, "DurableMoved": DurableMoved,
    "StopAt": StopAt, "Ping": Ping, "Index": Index, "Pull": Pull, "ShardHeader": ShardHeader,
    "Copied": Copied, "MemberState": MemberState, "Report": Report,
    "ReportChange": ReportChange, "Relay": Relay, "Relayed": Relayed,
    "Learn": Learn, "Learned": Learned, "Trace": Trace,
}  # fmt: skip
"""By the names that lines have for them: these stay, whatever a class is called."""
_LINES = JsonLines(KINDS, "this protocol", VERSION, MAX_LINE)


def encode(message: Message) -> bytes:
    """One line, newline included. Raises ProtocolError where it is too long."""
    return _LINES.encode(message)


def decode(line: bytes, cut: Callable[[Any], Any] = lambda body: body) -> Message:
    """The message in one line; raises ProtocolError with a sentence. `cut`: what is left of a body, before its values
    are converted."""
    return typing.cast(Message, _LINES.decode(line, cut))
