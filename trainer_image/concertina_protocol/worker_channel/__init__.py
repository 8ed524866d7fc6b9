"""Channel between an agent and the processes of its replica (workers, the uploader, the tracking process).

The package contains the messages and both ends. The agent serves one unix stream socket (CONCERTINA_SOCKET), with a
connection per process and one JSON object a line: {"kind": name in KINDS, "body": fields} (`lines`). The first line
identifies the process. `worker_messages`, `uploader_messages` and `tracker_messages` describe what each of them sends
and receives. `worker_end` is their end. `agent_end`, on asyncio, is imported by agents only.
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
    Beat,
    CallCount,
    Committed,
    CopiedUpTo,
    Done,
    DrainRequest,
    Fault,
    Fetch,
    Fetched,
    FetchedHeader,
    FetchHeader,
    Hello,
    KeepsState,
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
    "KINDS",
    "Beat",
    "CallCount",
    "ChannelClosed",
    "Committed",
    "CopiedUpTo",
    "Done",
    "DrainRequest",
    "Fault",
    "Fetch",
    "FetchHeader",
    "Fetched",
    "FetchedHeader",
    "Hello",
    "KeepsState",
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
