"""Process that is forked before it is needed, and becomes the next worker or the next store of a round.

The agent sends one packet over a SOCK_SEQPACKET socket. The packet contains a JSON object with the field "run", which
names a function, and the field "environment". The packet also has file descriptors, which are the arguments of the
function. If the agent closes its end instead, the process exits.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import json
import os
import socket
import time

from concertina_agent.workers import stacks
from concertina_agent.workers.forkserver import MAX_FDS, MAX_PACKET, run_target
from concertina_protocol.worker_channel import ENTERED


def stand_by(control: int) -> int:
    """Wait for the packet, call its function, and return the exit code. `control` is the socket's file descriptor."""
    with socket.socket(fileno=control) as agent:
        data, fds, _, _ = socket.recv_fds(agent, MAX_PACKET, MAX_FDS)
    if not data:
        return 0
    request = json.loads(data)
    os.environ.clear()
    os.environ.update(request["environment"], **{ENTERED: repr(time.perf_counter())})
    stacks.register(request["environment"])
    return run_target(request["run"], fds)
