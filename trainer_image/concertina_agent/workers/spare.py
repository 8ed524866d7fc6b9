"""Process that is forked and warmed up before it is needed, and becomes a worker when it receives an environment.

A spare and its agent share a SOCK_SEQPACKET socket. The spare sends {"warm": true}. The agent sends the environment of
the worker, a JSON object, or closes its end, and the spare exits.
"""

from __future__ import annotations

import json
import os
import socket
import time

from concertina_agent.workers import stacks
from concertina_agent.workers.forkserver import MAX_PACKET, run_target


def stand_by(control: int, warm_up: str, target: str) -> int:
    """Warm up, wait for an environment, call the target in it, and return the exit code.

    Args:
        control: File descriptor of the socket.
        warm_up: Function "module:function" that makes the first step of a worker cheap, and changes nothing else.
        target: Function "module:function" of a worker. Its argument is the time (perf_counter) at which the environment
            arrived.
    """
    with socket.socket(fileno=control) as agent:
        if code := run_target(warm_up, ()):
            return code
        try:
            agent.send(b'{"warm": true}')
            data = agent.recv(MAX_PACKET)
        except OSError:  # the agent is gone
            return 0
    if not data:
        return 0
    entered, environment = time.perf_counter(), json.loads(data)
    os.environ.clear()
    os.environ.update(environment)
    stacks.register(environment)
    return run_target(target, [entered])
