"""`trainingjob.run`: rounds of a script whose process stays (see `concertina_protocol.worker_channel.rounds`).

A round is a period in which a fixed set of replicas trains. When a round ends, everything that belongs to it is closed:
the process groups, the channel to the agent, the `State`, the data and the step count. The next round begins in the
same process as it would in a new one: with new environment variables, and at the beginning of `main`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Callable, Generic, Optional, TypeVar, Union

from concertina_protocol.stderr import write_line
from concertina_protocol.worker_channel import Left
from concertina_protocol.worker_channel.rounds import RoundChannel, RoundLeft
from trainingjob import _channel
from trainingjob._channel import RoundEnded
from trainingjob._connection import make_tracer
from trainingjob._world import world

if TYPE_CHECKING:
    from types import ModuleType

T = TypeVar("T")
KEPT_LINES = 50
"""Number of the last lines of a traceback to send to the agent."""
STORE_SECONDS = 10.0
"""Maximum seconds to wait for the store of rank 0. Afterwards, torch itself waits for it."""
STORE_PAUSE, LONGEST_PAUSE = 0.005, 0.05
"""First and longest pause in seconds between two attempts to connect to the store."""
HOLD_THE_WORLD = {
    "accelerate.state": "PartialState._shared_state",
    "deepspeed.comm.comm": "cdb",
    "jax._src.distributed": "global_state.client",
    "megatron.core.parallel_state": "_DATA_PARALLEL_GROUP",
}
"""Libraries that keep the ranks or groups of a world for the life of the process.

Maps each module to the name of its variable that contains the ranks or groups.
"""


@dataclasses.dataclass(frozen=True)
class Finished(Generic[T]):
    """Return value of the script's `main`, once the run is complete."""

    value: T


def run(path: str, main: Callable[[], T]) -> T:
    """Run `main` under the agent, once for each round. See `trainingjob.run`.

    A round is a period in which the set of ranks stays the same.

    Args:
        path: Path of the agent's socket.
        main: The script's function.

    Raises:
        RuntimeError: When this process already has a connection to its agent.
    """
    groups, why = _process_groups()
    if groups is None:
        write_line(f"trainingjob.run: each round starts a new process: {why}")
        return main()
    groups.prepare_to_stay()
    group_sockets = groups.GroupSockets()
    connections = groups.Connections(group_sockets)
    try:
        rounds = _channel.connect(path, connections.abort)
    except RuntimeError as error:
        raise RuntimeError(
            "trainingjob.run was called twice, or after another function of trainingjob that communicates "
            "with the job. Call it once, and call the others within main."
        ) from error
    if rounds is None:
        return main()
    store_was_torchs = False
    while True:
        outcome = _one_round(rounds, groups, main, store_was_torchs)
        if isinstance(outcome, Finished):
            rounds.complete_round()
            return outcome.value
        if library := _holds_the_world():
            write_line(
                f"trainingjob.run: this process ends with its round, because {library} keeps the old ranks and groups."
            )
            os._exit(outcome.code)
        store_was_torchs = groups.meets_at_master_port()
        connections.hold()  # closed connections would disturb ranks that have not left yet
        _end_round(groups)
        group_sockets.forget()
        rounds.say_left(outcome)
        gc.collect()  # frees the old model while the agents prepare the next round
        entry = rounds.next_round()
        connections.release()
        os.environ.update(entry.environment)
        groups.number_meshes(world().round)


def _holds_the_world() -> str:
    """Return the name of an imported library that keeps ranks or process groups of a round in global variables.

    Such a library can't be used in a second round of the process. If there is none, the result is "".

    The name is that of the library's module.
    """
    for module, variable in HOLD_THE_WORLD.items():
        value: Any = sys.modules.get(module)
        for name in variable.split("."):
            value = getattr(value, name, None)
        if value:
            return module.partition(".")[0]
    return ""


def _process_groups() -> tuple[Optional[ModuleType], str]:
    """Return the module `process_groups` if this process can stay, or otherwise None and the reason as a sentence."""
    if importlib.util.find_spec("torch") is None:
        return None, "torch is not installed, and a process can stay only with torch's process groups."
    try:
        from concertina_state import process_groups
    except ImportError as error:
        import torch

        return None, f"torch {torch.__version__} is too old ({error})."
    if not process_groups.can_stay():
        return None, "this process has a GPU (docs/gpu-checks.md)."
    return process_groups, ""


def _one_round(
    rounds: RoundChannel, groups: ModuleType, main: Callable[[], T], wait_for_store: bool
) -> Union[Finished[T], Left]:
    """Call `main` in one round. Return its result if the run is complete, or a Left message if the process stays.

    All other exceptions of `main` are raised. They end the process, and the agent starts a new one.

    Raises:
        SystemExit: When the script exits by itself.
    """
    here = world()
    code, output = 1, ""
    try:
        channel = _channel.enter(rounds, here.rank, make_tracer, stays=True)
        groups.number_groups(here.round)
        if wait_for_store and here.rank != 0:
            _wait_for_store(rounds)
        value = main()
        if not channel.stops:
            return Finished(value)
        code = 0  # after the last should_checkpoint()
    except RoundLeft:
        pass
    except SystemExit as end:
        if not isinstance(end, RoundEnded) and not (channel.stops and end.code in (None, 0)):
            raise
        code = 0
    except Exception as error:
        lost_peer = any(groups.lost_peer(each, aborted=rounds.over) for each in _with_causes(error))
        if not lost_peer or not channel.may_stay():
            raise
        if not rounds.over:
            output = traceback.format_exc()
            sys.stderr.write(output)
    return Left(here.round, code, tuple(output.splitlines()[-KEPT_LINES:]))


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it (`__cause__`, `__context__`), directly or indirectly."""
    seen: set[int] = set()
    waiting: list[Optional[BaseException]] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__]


def _end_round(groups: ModuleType) -> None:
    """Close everything that belongs to the round, so that none of it can affect the next round."""
    _channel.leave()
    for name in ("trainingjob._state", "trainingjob._data"):
        if (module := sys.modules.get(name)) is not None:
            module.end_round()
    own: Any = (threading.main_thread(), threading.current_thread())
    dummy = threading._DummyThread  # threads of libraries, which Python has not started
    _channel.threads_of_earlier_rounds.update(
        thread for thread in threading.enumerate() if thread not in own and not isinstance(thread, dummy)
    )
    groups.leave()
    sys.stdout.flush()
    sys.stderr.flush()


def _wait_for_store(rounds: RoundChannel) -> None:
    """Wait until rank 0 serves the store at MASTER_PORT.

    torch would wait too, but after a failed attempt it tries again only after up to a second.

    Raises:
        RoundLeft: When the round has ended.
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    until, pause = time.monotonic() + STORE_SECONDS, STORE_PAUSE
    while time.monotonic() < until:
        rounds.check()
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=LONGEST_PAUSE):
            return
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
