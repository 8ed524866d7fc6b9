"""What a container sees: the machine's files, with the pod's volumes at their mountPath, and /dev and /proc of its own.

All of it is arranged in the child that becomes the container, in a mount namespace of its own: nothing shows outside,
and nothing is left when it ends.
"""

import contextlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from concertina.local.host import linux_namespaces

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "fuse")
_GPU_DEVICES = ("nvidia", "kfd", "dri", "infiniband")  # beginnings of names
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}


@dataclass(frozen=True)
class Mount:
    """A file or folder of the machine that appears at target."""

    source: str
    target: str
    read_only: bool = False


class RootFileSystem:
    """The root of one container while it is being arranged."""

    def __init__(self, gpus: bool) -> None:
        self._gpus = gpus
        self._own: set[str] = set()  # folders in memory, made here: entries may be added
        self._volumes: set[str] = set()  # mounted volumes: so may they anywhere below these

    def build(self, mounts: Sequence[Mount]) -> None:
        """Mount parents before children."""
        ordered = sorted(mounts, key=lambda mount: mount.target.rstrip("/").count("/"))
        # Opened before anything is mounted over the paths that they come from.
        sources = [os.open(mount.source, os.O_PATH | os.O_CLOEXEC) for mount in ordered]
        replaced = any(not os.path.lexists("/" + mount.target.split("/")[1]) for mount in ordered)
        if replaced:
            self._replace_root()
        self._mount_dev()
        for mount, source in zip(ordered, sources, strict=True):
            is_folder = stat.S_ISDIR(os.fstat(source).st_mode)
            target = os.path.realpath(mount.target)
            self._make(target, is_folder)
            linux_namespaces.bind(f"/proc/self/fd/{source}", target, mount.read_only)
            os.close(source)
            if is_folder:
                self._volumes.add(target)
        if replaced:  # not earlier: nothing can be bound from a mount that is detached
            linux_namespaces.unmount("/.machine")
            os.rmdir("/.machine")

    def _make(self, target: str, is_folder: bool) -> None:
        """Make sure that target exists, without writing into the machine's own folders."""
        if os.path.exists(target):
            return
        parent = os.path.dirname(target)
        self._make(parent, True)
        if parent not in self._own and not any(f"{parent}/".startswith(f"{volume}/") for volume in self._volumes):
            self._shadow(parent)
        if is_folder:
            os.mkdir(target)
            self._own.add(target)
        else:
            _touch(target)

    def _shadow(self, folder: str) -> None:
        """Put a folder in memory over folder, with its entries bound into it, so that more can be added."""
        old = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        mode = stat.S_IMODE(os.fstat(old).st_mode)
        names = os.listdir(folder)
        linux_namespaces.mount("tmpfs", folder, "tmpfs", 0, f"mode={mode:o}")
        for name in names:
            _show(f"/proc/self/fd/{old}/{name}", os.path.join(folder, name))
        os.close(old)
        self._own.add(folder)

    def _replace_root(self) -> None:
        """The same for /, over which nothing can be mounted: move into a folder in memory, show the old root in it."""
        linux_namespaces.mount("tmpfs", "/tmp", "tmpfs", 0, "mode=755")
        os.mkdir("/tmp/.machine")
        linux_namespaces.pivot_root("/tmp", "/tmp/.machine")
        for name in os.listdir("/.machine"):
            _show(f"/.machine/{name}", f"/{name}")
        self._own.add("/")

    def _mount_dev(self) -> None:
        """A /dev as container runtimes make it: the harmless devices, and GPUs where they are asked for."""
        shown = _GPU_DEVICES if self._gpus else ()
        wanted = [name for name in os.listdir("/dev") if name in _DEVICES or name.startswith(shown)]
        old = os.open("/dev", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        linux_namespaces.mount("tmpfs", "/dev", "tmpfs", linux_namespaces.MS_NOSUID, "mode=755,size=64k")
        for name in wanted:
            _show(f"/proc/self/fd/{old}/{name}", f"/dev/{name}")
        os.close(old)
        for name, target in _LINKS.items():
            os.symlink(target, f"/dev/{name}")
        os.mkdir("/dev/shm", 0o1777)
        os.mkdir("/dev/pts")
        try:
            linux_namespaces.mount(
                "devpts", "/dev/pts", "devpts", linux_namespaces.MS_NOSUID, "newinstance,ptmxmode=0666,mode=0620"
            )
            os.symlink("pts/ptmx", "/dev/ptmx")
        except OSError:  # no terminals then; nothing else misses them
            pass
        self._own.add("/dev")


def mount_proc() -> None:
    """Show the pid namespace's own processes. Where parts of /proc are hidden (Docker) the old one stays."""
    with contextlib.suppress(PermissionError):
        linux_namespaces.mount("proc", "/proc", "proc")


def _show(source: str, target: str) -> None:
    """Make the file, folder or link source appear at target, where nothing is yet."""
    try:
        mode = os.lstat(source).st_mode
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(source), target)
            return
        if stat.S_ISDIR(mode):
            os.mkdir(target)
        else:
            _touch(target)
        linux_namespaces.bind(source, target)
    except (PermissionError, FileNotFoundError):  # not for us, or just gone
        pass


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
