"""Protocol between the operator and the agents.

The messages are in `messages`. An agent and the processes of its own replica communicate over `worker_channel`.

The package uses the standard library only and supports Python 3.9 and later. Only `connection`, `waiting` and
`worker_channel.agent_end` use asyncio, because workers and users' scripts import the other modules.

The wire is TLS with the job's own CA. Each line is one JSON object of at most MAX_LINE bytes (`connection`). A
connection carries one request after another. The answer is one line. The answer to `Watch` and `Join` is a stream: a
line whenever something changes, and at least every REPORT_SECONDS or BEAT_SECONDS. On a connection that carries a
`Watch`, Prepare, Assign, Release, Drain and Save are answered in order, between the lines of the stream, if the Report
has `takes_calls`.

A line is {"v": VERSION, "kind": name in KINDS, "body": fields} (`lines`). A side accepts the version before and after
its own, because agents keep running while their operator is upgraded. It ignores unknown fields, new fields have
defaults, and a state that only a newer side defines is equal to none of the known states (`typed_json.OpenEnum`).

The name in the client certificate decides which requests are allowed. Only the operator, `<uid>.operator`, may send
Drain, Save and Relay. Agents, `<uid>.agent`, may send each other Ping, Join, Index, Pull and Learn. Both may send
Watch, which `concertina-agent report` uses, and Prepare, Assign and Release, which agents pass on (decision "Agents
pass on what the operator says").

`concertina_agent.core.states` defines the states of an agent: idle -> prepared (Prepare) -> running (Assign) -> one of
drained, succeeded and failed. Only a Prepare of a higher round leads back to prepared, from any of them. Each start of
an agent has a new instance id. The agent reads the highest (round, claim) that it has ever seen back from its volume.

The agent's core enforces these rules, and the simulation asserts them:
- A Prepare or Assign of a round lower than the highest one seen is refused. So is the same round under another claim.
- Prepare kills the workers of every older round before it is answered. The same Prepare again gets the same answer.
- Assign is accepted only for the prepared (round, claim), and only if the instance id named for this agent is its own.
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
    Release,
    Replaced,
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
    "Release",
    "Replaced",
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
"""TCP port of the agent, unless the pod sets another one in CONCERTINA_PORT."""
EXIT_OLD_PYTHON = 69
"""Exit code of an agent that a Python older than 3.9 started."""
MAX_LINE = 4 * 1024 * 1024
BEAT_SECONDS = 0.5
REPORT_SECONDS = 1.0
"""Longest time between two lines to the operator when nothing has changed."""
SILENCE_SECONDS = 3.0
"""Time without a line after which a stream is considered lost."""

Message = Union[
    Prepare, Prepared, Assign, Release, Drain, Save, Accepted, Refused, Watch, Join, DurableMoved, StopAt, Ping, Index,
    Pull, ShardHeader, Copied, MemberState, Report, ReportChange, Relay,
    Relayed, Learn, Learned, Trace,
]  # fmt: skip
KINDS: dict[str, type[Any]] = {
    "Prepare": Prepare, "Prepared": Prepared, "Assign": Assign, "Release": Release, "Drain": Drain,
    "Save": Save, "Accepted": Accepted, "Refused": Refused, "Watch": Watch, "Join": Join, "DurableMoved": DurableMoved,
    "StopAt": StopAt, "Ping": Ping, "Index": Index, "Pull": Pull, "ShardHeader": ShardHeader,
    "Copied": Copied, "MemberState": MemberState, "Report": Report,
    "ReportChange": ReportChange, "Relay": Relay, "Relayed": Relayed,
    "Learn": Learn, "Learned": Learned, "Trace": Trace,
}  # fmt: skip
"""Message classes by their names on the wire. These names are stable, even if a class is renamed."""
_LINES = JsonLines(KINDS, "this protocol", VERSION, MAX_LINE)


def encode(message: Message) -> bytes:
    """Return a message as one line, including the newline.

    Raises:
        ProtocolError: If the line is longer than MAX_LINE.
    """
    return _LINES.encode(message)


def decode(line: bytes, cut: Callable[[Any], Any] = lambda body: body) -> Message:
    """Return the message in one line.

    Args:
        line: Line to decode.
        cut: Function that reduces the parsed body before its values are converted.

    Raises:
        ProtocolError: If the line is not a valid message. The error is a sentence.
    """
    return typing.cast(Message, _LINES.decode(line, cut))
