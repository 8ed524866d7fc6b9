"""Which sockets and meshes belong to a round."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FakeStore
from torch.distributed import TCPStore, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from concertina_state import process_groups

HERE = "127.0.0.1"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(DeviceMesh, "__init__", DeviceMesh.__init__)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    process_groups.leave()


def test_no_mesh_equals_one_of_an_earlier_round(world: None) -> None:
    def meshes() -> list[DeviceMesh]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        return [mesh, mesh["tensor"], mesh["data", "tensor"]._flatten("all")]

    first = meshes()
    process_groups.number_meshes(2)
    second, again = meshes(), meshes()
    process_groups.number_meshes(3)
    third = meshes()
    for each in zip(first, second, third, strict=True):
        assert len(set(each)) == 3
    assert second == again
    assert list(map(hash, second)) == list(map(hash, again))


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((HERE, 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        return client, listening.accept()[0]


def test_an_abort_ends_the_connections_of_groups_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    sockets: list[socket.socket] = [*connected()]

    def make(*arguments: object) -> None:
        sockets.extend(connected())

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", make)
    is_of_group = process_groups.GroupSockets()
    distributed_c10d._new_process_group_helper()
    sockets.extend(connected())
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    connections = process_groups.Connections(is_of_group)
    with socket.create_connection((HERE, store.port)) as client:
        connections.abort()
        assert client.recv(1) == b""
    before, before_peer, grouped, grouped_peer, after, after_peer = sockets
    assert grouped.recv(1) == grouped_peer.recv(1) == b""
    connections.release()
    for one, other in ((before, before_peer), (after, after_peer)):
        one.setblocking(False)
        with pytest.raises(BlockingIOError):  # not the end
            one.recv(1)
        one.sendall(b"x")
        assert other.recv(1) == b"x"
    for each in sockets:
        each.close()


def test_a_group_that_is_being_made_is_aborted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("MASTER_PORT", "0")
    aborted = []

    def make() -> None:
        client, peer = connected()
        with client, peer:
            connections = process_groups.Connections(is_of_group)
            connections.abort()
            aborted.append(client.recv(1))
            connections.release()

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", make)
    is_of_group = process_groups.GroupSockets()
    distributed_c10d._new_process_group_helper()
    assert aborted == [b""]


def answer_until_refused(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"answer")


def test_a_rank_that_has_not_left_can_write_to_one_that_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's answer to a rank that waits must not fail: it would lose the error."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ours, theirs = connected()
    theirs.sendall(b"not read by the one that leaves")
    inode = os.fstat(ours.fileno()).st_ino
    connections = process_groups.Connections(lambda each, connection: each == inode)
    connections.hold()
    ours.close()
    for _ in range(3):
        theirs.sendall(b"answer")
    connections.release()
    with pytest.raises(ConnectionError):
        answer_until_refused(theirs)
    theirs.close()


def test_groups_of_a_round_have_names_of_their_own() -> None:
    names = []
    for round in (4, 5):
        process_groups.number_groups(round)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        names.append(set(distributed_c10d._world.pg_names.values()))
        group = weakref.ref(dist.group.WORLD)
        process_groups.leave()
        assert group() is None
    assert not names[0] & names[1]
