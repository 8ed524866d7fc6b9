"""Channel between an agent and the processes of its replica: workers, the uploader and the tracking process.

The package contains the messages and both ends of the channel. The agent listens on a unix stream socket
(CONCERTINA_SOCKET), and each process opens one connection. Each line is a JSON object: {"kind": name in KINDS, "body":
fields} (`lines`). The first line of a connection says which process it is.

The modules `worker_messages`, `uploader_messages` and `tracker_messages` contain the messages of each kind of process.
Processes use the module `worker_end`. Agents use `agent_end`, which requires asyncio.
"""

from concertina_protocol.worker_channel.codec import KINDS, Message, decode, encode
from concertina_protocol.worker_channel.tracker_messages import ShipAll, TrackerHello, TrackingState
from concertina_protocol.worker_channel.uploader_messages import (
    Probe,
    Publish,
    Published,
    Ship,
    Shipped,
    StorageState,
    Undo,
    UploaderHello,
)
from concertina_protocol.worker_channel.worker_end import ChannelClosed, WorkerEnd
from concertina_protocol.worker_channel.worker_messages import (
    BAD_INPUT_EXIT,
    ENTERED,
    Beat,
    CallCount,
    CallList,
    Committed,
    CopiedUpTo,
    Done,
    DrainRequest,
    Enter,
    Fault,
    Fetch,
    Fetched,
    FetchedHeader,
    FetchHeader,
    Hello,
    KeepsState,
    Leave,
    Left,
    ListCalls,
    Outcome,
    QueryCalls,
    Register,
    Registered,
    SaveNow,
    Start,
    StopAtCall,
    TraceSteps,
    WantDurable,
)

__all__ = [
    "BAD_INPUT_EXIT",
    "ENTERED",
    "KINDS",
    "Beat",
    "CallCount",
    "CallList",
    "ChannelClosed",
    "Committed",
    "CopiedUpTo",
    "Done",
    "DrainRequest",
    "Enter",
    "Fault",
    "Fetch",
    "FetchHeader",
    "Fetched",
    "FetchedHeader",
    "Hello",
    "KeepsState",
    "Leave",
    "Left",
    "ListCalls",
    "Message",
    "Outcome",
    "Probe",
    "Publish",
    "Published",
    "QueryCalls",
    "Register",
    "Registered",
    "SaveNow",
    "Ship",
    "ShipAll",
    "Shipped",
    "Start",
    "StopAtCall",
    "StorageState",
    "TraceSteps",
    "TrackerHello",
    "TrackingState",
    "Undo",
    "UploaderHello",
    "WantDurable",
    "WorkerEnd",
    "decode",
    "encode",
]
