"""What an agent and the processes of its replica (workers, the uploader, the tracking process) say to each other, and
both ends of it.

One unix stream socket (CONCERTINA_SOCKET), served by the agent, a connection per process, one JSON object a line:
{"kind": name in KINDS, "body": fields} (`lines`). The first line says who speaks: `worker`, `uploader` and `tracker`
tell what each of them says and hears. `worker_end` is their end; `agent_end`, on asyncio, is imported by agents alone.
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
