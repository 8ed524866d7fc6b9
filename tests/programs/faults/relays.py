"""Delay of LINE_DELAY seconds for all messages of gloo between two ranks.

Kernels without netem can't delay packets, so each connecting rank uses a relay of its own. gloo's ranks publish their
addresses in the store, and of two ranks the one with the lower address connects.
"""

import os
import queue
import re
import socket
import threading
import time

from torch._C._distributed_c10d import Store

ADDRESS = re.compile(rb"(?<=\x02\x00)(..)\x7f\x00\x00\x01", re.DOTALL)
"""Layout of a sockaddr_in of the loopback interface: family, port, address."""


KEPT = []
"""Stores that must not be garbage collected: gloo may use them for as long as its group lives, and holds no Python
object."""


def between_ranks(gloo):
    """Return a function that creates gloo process groups with relays."""

    def made(store, *arguments, **more):
        KEPT.append(Relaying(store))
        return gloo(KEPT[-1], *arguments, **more)

    return made


class Relaying(Store):
    """Store in which the addresses of other ranks are replaced by those of relays."""

    def __init__(self, store):
        super().__init__()
        self._store, self._own, self._relays = store, None, {}

    def set(self, key, value):
        self._own = self._own or _port(value)
        self._store.set(key, value)

    def get(self, key):
        value = self._store.get(key)
        port = _port(value)
        if port in (None, self._own):
            return value
        if port not in self._relays:
            self._relays[port] = _relay(port, self._own)
        changed = self._relays[port].to_bytes(2, "big")
        return ADDRESS.sub(lambda found: changed + found[0][2:], value)

    def wait(self, *arguments):
        self._store.wait(*arguments)


def _port(value):
    match = ADDRESS.search(value)
    return int.from_bytes(match[1], "big") if match else None


def _relay(port, own):
    """Return the port of a relay to this port.

    It is on the same side of this rank's own port, so that the connecting rank stays the same.

    Raises:
        OSError: If the rank does not connect in time.
    """
    for other in range(port + 1, 1 << 16) if port > own else range(port - 1, 1023, -1):
        try:
            listening = socket.create_server(("127.0.0.1", other))
        except OSError:
            continue
        threading.Thread(target=_serve, args=(listening, port), daemon=True).start()
        return other
    raise OSError(f"no port beside {port} is free")


def _serve(listening, port):
    while True:
        near, _ = listening.accept()
        far = socket.create_connection(("127.0.0.1", port))
        for ends in ((near, far), (far, near)):
            for each in ends:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            under_way = queue.SimpleQueue()
            threading.Thread(target=_take, args=(ends[0], under_way), daemon=True).start()
            threading.Thread(target=_give, args=(ends[1], under_way), daemon=True).start()


def _take(source, under_way):
    delay = float(os.environ["LINE_DELAY"])
    content = b"-"
    while content:
        try:
            content = source.recv(1 << 16)
        except OSError:
            content = b""
        under_way.put((time.monotonic() + delay, content))


def _give(target, under_way):
    while True:
        at, content = under_way.get()
        time.sleep(max(0.0, at - time.monotonic()))
        try:
            if not content:
                return target.shutdown(socket.SHUT_WR)
            target.sendall(content)
        except OSError:
            return None
