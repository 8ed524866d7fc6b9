"""Process that is forked and warmed up before it is needed: a worker, or the store of a round.

A spare and its agent share a SOCK_SEQPACKET socket. The spare sends {"warm": true}. The agent sends the environment as
a JSON object, with the files of the target, or closes its end, and the spare exits.
"""

from __future__ import annotations

import json
import os
import socket
import time

from concertina_agent.workers import stacks
from concertina_agent.workers.forkserver import MAX_FDS, MAX_PACKET, run_target


def stand_by(control: int, warm_up: str, target: str) -> int:
    """Warm up, wait for an environment, call the target in it, and return the exit code.

    Args:
        control: File descriptor of the socket.
        warm_up: Function "module:function" that makes the start of the target cheap, and changes nothing else; or "".
        target: Function "module:function". Its arguments are the file descriptors that came with the environment. If
            there are none, its argument is the time (perf_counter) at which the environment arrived.
    """
    with socket.socket(fileno=control) as agent:
        code = run_target(warm_up, ()) if warm_up else 0
        if code:
            return code
        try:
            agent.send(b'{"warm": true}')
            data, fds, _, _ = socket.recv_fds(agent, MAX_PACKET, MAX_FDS)
        except OSError:  # the agent is gone
            return 0
    if not data:
        return 0
    entered, environment = time.perf_counter(), json.loads(data)
    os.environ.clear()
    os.environ.update(environment)
    stacks.register(environment)
    return run_target(target, fds or [entered])
