"""Store of the ranks: each sends a line a step, and receives the greatest value of all.

A lost rank breaks it for all.
"""

import selectors
import socket


class Peer:
    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.world, self.value, self.text = connection, 0, None, b""


def serve(fd: int) -> None:
    listening, selector = socket.socket(fileno=fd), selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    peers: list[Peer] = []
    while True:
        for key, _ in selector.select():
            if key.fileobj is listening:
                peers.append(Peer(listening.accept()[0]))
                selector.register(peers[-1].connection, selectors.EVENT_READ, peers[-1])
            else:
                hear(key.data, peers, selector)


def hear(peer: Peer, peers: list[Peer], selector: selectors.BaseSelector) -> None:
    try:
        data = peer.connection.recv(4096)
    except OSError:
        data = b""
    if not data:
        for one in peers:
            selector.unregister(one.connection)
            one.connection.close()
        peers.clear()
        return
    peer.text += data
    if peer.text.endswith(b"\n"):
        world, value = peer.text.split()
        peer.world, peer.value, peer.text = int(world), int(value), b""
    if len(peers) == peer.world and all(one.value is not None for one in peers):
        greatest = max(one.value for one in peers)
        for one in peers:
            one.value = None
            one.connection.sendall(f"{greatest}\n".encode())


class Group:
    """Rank's end of the connection to the store."""

    def __init__(self, host: str, port: int, world: int) -> None:
        self._world = world
        self._file = socket.create_connection((host, port)).makefile("rwb")

    def greatest(self, value: int) -> int:
        """Return the greatest of all ranks' values.

        Raises:
            ConnectionError: If a rank is lost.
        """
        self._file.write(f"{self._world} {int(value)}\n".encode())
        self._file.flush()
        line = self._file.readline()
        if not line:
            raise ConnectionError("Connection closed by peer")
        return int(line)
