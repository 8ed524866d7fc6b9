"""Process groups of torch in a process that takes part in one round after the other. Requires torch 2.15 or later.

A round is a period in which a fixed set of replicas trains. A new round can have a different set of ranks, so it needs
new process groups. The bundled trainer and `trainingjob.run` leave their rounds by the functions of this module.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _random
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from concertina_protocol.lost_peer import LOST_PEER

MOST_GROUPS = 1 << 16
"""Maximum number of process groups in a round."""


def can_stay() -> bool:
    """Return whether this process can leave a round and enter another one.

    A process that uses a GPU stays only if the environment variable CONCERTINA_GPU_STAYS is 1, because it is not known
    yet whether torch can leave a round on a GPU (docs/gpu-checks.md).
    """
    return not torch.cuda.is_available() or os.environ.get("CONCERTINA_GPU_STAYS") == "1"


def prepare_to_stay() -> None:
    """Set the environment variables with which this process can leave a round and enter the next one.

    Call this function before the first process group is created.
    """
    if torch.cuda.is_available():
        # Otherwise NCCL's watchdog ends a process that has lost a peer, before it can leave the round.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def number_groups(round: int) -> None:
    """Give the process groups of a round names that no earlier round in this process has used.

    If code uses a group that was kept from an earlier round, an error is raised. Without new names, such code could use
    a group of this round by mistake. All ranks must call this function, because the ranks of a group find each other by
    the group's name.
    """
    distributed_c10d._world.group_count = round * MOST_GROUPS


def number_meshes(round: int) -> None:
    """Make new device meshes compare as unequal to all device meshes of earlier rounds.

    DTensor caches placements, shapes and plans of communication by mesh, in each thread. Two meshes are equal if their
    ranks and names are equal. A process can have a different rank in each round. If its new mesh were equal to a mesh
    of an earlier round, DTensor would use values that were cached for the earlier rank, and results would be wrong
    without an error (decision "A survivor keeps its process").

    Raises:
        RuntimeError: When the installed torch compares meshes in a different way.
    """
    if "_thread_id" not in DeviceMesh.__annotations__:
        raise RuntimeError(f"torch {torch.__version__} does not compare device meshes by _thread_id")
    original = getattr(DeviceMesh.__init__, "__wrapped__", DeviceMesh.__init__)

    @functools.wraps(original)
    def init(self: DeviceMesh, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        if self._thread_id is None:
            self._thread_id, self._hash = -round, None

    DeviceMesh.__init__ = init  # type: ignore[method-assign]


class GroupSockets:
    """Record of the sockets that torch has opened for process groups.

    All other sockets of the process belong to the script and its libraries.
    """

    def __init__(self) -> None:
        """Begin to record. Sockets of groups that exist already are not recorded."""
        self._inodes: set[int] = set()
        self._before: set[int] | None = None
        """Sockets that existed before the group that is being created, or None if no group is being created."""
        make = distributed_c10d._new_process_group_helper

        @functools.wraps(make)
        def make_and_record(*arguments: Any, **options: Any) -> Any:
            self._before = {inode for _, inode in _sockets()}
            try:
                return make(*arguments, **options)
            finally:
                self._inodes |= {inode for _, inode in _sockets()} - self._before
                self._before = None

        distributed_c10d._new_process_group_helper = make_and_record

    def __call__(self, inode: int, connection: socket.socket) -> bool:
        """Return whether a socket belongs to a process group, or is a connection to the store at MASTER_PORT."""
        before = self._before
        if inode in self._inodes or (before is not None and inode not in before):
            return True
        port = int(os.environ.get("MASTER_PORT") or 0)
        try:
            return port in (connection.getsockname()[1], connection.getpeername()[1])
        except OSError:  # not connected
            return False

    def forget(self) -> None:
        """Remove the sockets of process groups that have been closed."""
        self._inodes.clear()


class Connections:
    """Connections of the process's groups, which can be ended so that no rank waits for a timeout.

    Gloo's collectives raise an error if they can no longer read. An error of a write can get lost. This happens if the
    connection ends while gloo answers an operation. Gloo has then already removed the operation from its list, and
    reports the error only to the operations on the list. The operation then waits until the timeout of the group.

    Therefore no write may fail. `abort` ends only reading, and only in this process. `hold` duplicates the sockets, so
    that the connections stay open after gloo has closed its own descriptors, until all ranks have left.
    """

    def __init__(self, is_of_group: Callable[[int, socket.socket], bool] = lambda inode, connection: True) -> None:
        """Prepare to end connections. No socket is duplicated yet.

        Args:
            is_of_group: Function that receives a socket's inode and the socket, and returns whether the socket belongs
                to a process group. By default, all sockets do. The bundled trainer uses the default, because its data
                reader reopens connections.
        """
        self._is_of_group = is_of_group
        self._held: dict[int, socket.socket] = {}
        """Duplicates of the connections' sockets, keyed by inode."""

    def hold(self) -> None:
        """Duplicate the connections' sockets, so that the connections stay open if gloo closes its own descriptors."""
        for number, inode in _sockets():
            if inode in self._held:
                continue
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                connection = stack.enter_context(socket.socket(fileno=os.dup(number)))
                is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if is_internet and not listens and self._is_of_group(inode, connection):
                    self._held[inode] = connection
                    stack.pop_all()

    def abort(self) -> None:
        """Make all collectives of this process raise an error, in all threads.

        For NCCL, a private function of torch aborts the process groups. For gloo, torch's abort does not suffice: a
        collective that waits for a rank that is still alive would wait until the timeout of the group. For gloo, this
        method therefore ends reading on all connections, including those to the store, because a rank may be waiting
        for the store.
        """
        if torch.cuda.is_available() and dist.is_initialized():
            distributed_c10d._abort_process_group()
            return
        self.hold()
        for connection in list(self._held.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)

    def release(self) -> None:
        """Close the duplicated sockets. Call this method when all ranks have left the round."""
        while self._held:
            self._held.popitem()[1].close()


def _sockets() -> Iterator[tuple[int, int]]:
    """Yield the file descriptor and the inode of each socket of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                yield int(name), status.st_ino


def lost_peer(error: BaseException, aborted: bool) -> bool:
    """Return whether an error only shows that another rank is gone, or that this process's groups were aborted.

    After any other error, for example of a device or of memory, the process must not continue.
    """
    if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
        return False
    return aborted or any(sign in str(error) for sign in LOST_PEER)


def meets_at_master_port() -> bool:
    """Return whether the default process group was created with a TCPStore at MASTER_PORT.

    In that case, the worker with rank 0 serves the round's store by torch.
    """
    if not dist.is_initialized():
        return False
    store: Store = distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore) and str(store.port) == os.environ.get("MASTER_PORT")


def leave() -> None:
    """Close all process groups, and clear DTensor's caches for their meshes, which no other round can use."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()
    DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_cached.cache_clear()
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()
    _random._rng_tracker = None  # a new process makes one too, by a collective
