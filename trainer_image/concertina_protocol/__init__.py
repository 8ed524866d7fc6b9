"""Messages between the operator and the agents, and between agents.

The package `messages` contains these messages. The package `worker_channel` contains the messages between an agent and
the processes of the agent's own replica.

The package uses the standard library only and supports Python 3.9 and later. Workers and users' scripts import it
without asyncio: only `connection`, `waiting` and `worker_channel.agent_end` use asyncio.

Connections use TLS with a CA of the job's own. Each line is one JSON object of at most MAX_LINE bytes (`connection`). A
connection carries one request after another, and the answer to a request is one line. The requests `Watch` and `Join`
are exceptions: their answer is a stream of lines. A line is sent after each change, and at least every REPORT_SECONDS
(`Watch`) or BEAT_SECONDS (`Join`). The operator can send Prepare, Assign, Release, Drain, Save and Relay on the
connection of a `Watch`, if `takes_calls` is set in the agent's Report. The agent then answers these requests in order,
between the lines of the stream. The answers to a Relay (a request to pass a message on) come in any order, and each
repeats the Relay's number.

A line is {"v": VERSION, "kind": name in KINDS, "body": fields} (`lines`). Each side accepts its own version and the
versions just before and after it, because agents keep running while their operator is upgraded. Each side ignores
unknown fields, and new fields have defaults. An unknown value of an enum is kept as a value that differs from all known
ones (`typed_json.OpenEnum`).

The name in the client certificate decides which requests are allowed:
- Only the operator, `<uid>.operator`, may send Drain, Save and Relay.
- Agents, `<uid>.agent`, may send each other Ping, Join, Index, Pull and Learn.
- Both may send Watch, Prepare, Assign and Release. Agents send Watch for `concertina-agent report`, and pass on the
  other three (decision "Agents forward the operator's messages").

`concertina_agent.core.states` defines the states of an agent. An agent goes from idle to prepared (by Prepare), to
running (by Assign), and then to drained, succeeded or failed. From any state, only a Prepare of a higher round leads
back to prepared. Each start of an agent has a new instance id. In its volume, the agent stores the highest (round,
claim) that it has seen. It reads this pair after a restart. A claim is the operator's decision to begin a round.

The agent enforces these rules, and the simulation tests them:
- A Prepare or Assign is refused if the agent has seen a higher round, or the same round with another claim.
- The agent kills the workers of all older rounds before it answers a Prepare. If the same Prepare arrives again, it
  gives the same answer.
- Assign is accepted only for the prepared (round, claim), and only if it names the agent's own instance id. If the same
  Assign arrives again, the agent acknowledges it, but starts nothing.

In a drain, all ranks stop after the same step. The message Prepare asks a replica to join the next round. A round is a
period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any, Union

from concertina_protocol.codec.lines import JsonLines
from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.messages.collectives import GroupCalls, HungCollective
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
    BestCheckpoint,
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
    "DOUBT_SECONDS",
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
    "BestCheckpoint",
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
    "GroupCalls",
    "Hang",
    "Heartbeat",
    "HeldSnapshot",
    "HungCollective",
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
"""TCP port on which agents listen, unless the pod sets another one in CONCERTINA_PORT."""
EXIT_OLD_PYTHON = 69
"""Exit code of an agent that is started by a Python version older than 3.9."""
MAX_LINE = 4 * 1024 * 1024
BEAT_SECONDS = 0.5
REPORT_SECONDS = 1.0
"""Maximum seconds between two lines of a report stream to the operator. Without a change, the last report is
repeated."""
SILENCE_SECONDS = 3.0
"""Seconds without a line after which the operator or an agent considers a stream lost."""
DOUBT_SECONDS = 1.5
"""Seconds without a line from a member after which the coordinator reports the member as silent.

The operator then has the rest of SILENCE_SECONDS to find out by itself whether the member answers.
"""

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
"""Class of each message, keyed by the message's name in lines.

A name never changes, even if the class is renamed.
"""
_LINES = JsonLines(KINDS, "this protocol", VERSION, MAX_LINE)


def encode(message: Message) -> bytes:
    """Return a message as one line, including the newline.

    Raises:
        ProtocolError: If the line is longer than MAX_LINE bytes.
    """
    return _LINES.encode(message)


def decode(line: bytes, cut: Callable[[Any], Any] = lambda body: body) -> Message:
    """Return the message in one line.

    Args:
        line: Line to decode.
        cut: Function that shortens long lists in the parsed JSON of the body, before values are converted.

    Raises:
        ProtocolError: If the line is not a valid message. The error's text is a sentence.
    """
    return typing.cast(Message, _LINES.decode(line, cut))
