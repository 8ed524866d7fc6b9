"""Worker channel: both ends over a real Unix socket, and every message encoded and decoded."""

import asyncio
import socket
import threading
import time

import pytest

import concertina_protocol as protocol
from concertina_protocol import worker_channel as channel
from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.worker_channel.agent_end import AgentEnd

ID = protocol.SnapshotId(round=3, step=7, layout="abc", shards=2)
RESTORE = protocol.Restore("Memory", 7, ID, {"0": ("a",), "1": ("a", "b")})
STORAGE = protocol.Storage("Ready", protocol.Durable("u", 1, 2, "s3://b/x"))
MESSAGES = [
    channel.Hello(1, 2),
    protocol.Progress(1, 2, 3.5, 4.0, 0.1, 5, "training", 6.0, timeline={"group": 0.1}),
    channel.WantDurable(ID, 1, "/x", True),
    channel.Start(RESTORE, 2, "u"),
    channel.StorageState(STORAGE),
    channel.Published(ID, None, "a sentence", True),
    channel.Probe(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_message_survives_the_wire(message):
    assert channel.decode(channel.encode(message)) == message


def test_a_foreign_line_is_refused_with_a_sentence():
    with pytest.raises(ProtocolError, match="not a message of the worker channel"):
        channel.decode(b'{"kind": "Nonsense", "body": {}}')


def connected(path, talk):
    """Return a worker's end of a channel, and the thread in which the agent's end runs `talk`."""
    ready = threading.Event()

    async def agent():
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen()
            listening.setblocking(False)
            ready.set()
            connection, _ = await asyncio.get_running_loop().sock_accept(listening)
        end = AgentEnd(connection)
        await talk(end)
        end.release()

    thread = threading.Thread(target=lambda: asyncio.run(agent()))
    thread.start()
    assert ready.wait(10)
    return channel.WorkerEnd(path), thread


def test_an_answer_is_found_behind_other_messages_and_the_end_is_noticed(tmp_path):
    heard = []

    async def talk(end):
        heard.append(await end.receive())
        end.send(channel.CopiedUpTo(4))
        end.send(channel.FetchedHeader(header="h" * 200_000))
        end.send(channel.DrainRequest(durable=True))
        heard.append(await end.receive())
        end.close()

    worker, thread = connected(str(tmp_path / "socket"), talk)
    assert len(worker.request(channel.FetchHeader(ID, 0), channel.FetchedHeader).header) == 200_000
    rest = worker.poll()
    while len(rest) < 2:
        time.sleep(0.001)
        rest += worker.poll()
    assert rest == [channel.CopiedUpTo(4), channel.DrainRequest(durable=True)]
    worker.send(channel.Done("complete", 9))
    with pytest.raises(channel.ChannelClosed):
        worker.receive(channel.Start)
    worker.finish()
    thread.join(10)
    assert heard == [channel.FetchHeader(ID, 0), channel.Done("complete", 9)]


def test_what_a_process_says_last_is_heard_though_the_agent_is_writing_to_it(tmp_path):
    """Without `finish`, the agent's write to a closed socket would discard data that it has not read yet."""
    heard = []

    async def talk(end):
        while (message := await end.receive()) is not None:
            heard.append(message)
            await asyncio.sleep(0.001)
            for _ in range(20):
                end.send(channel.CopiedUpTo(1))

    worker, thread = connected(str(tmp_path / "socket"), talk)
    beats = [channel.Beat(1, step, "training") for step in range(50)]
    for message in (*beats, channel.Done("complete", 50)):
        worker.send(message)
    worker.finish()
    thread.join(10)
    assert heard == [*beats, channel.Done("complete", 50)]
