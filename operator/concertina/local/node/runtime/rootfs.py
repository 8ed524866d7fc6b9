"""Root file system of a container.

The root file system consists of the machine's files, the pod's volumes at their mount paths, and separate /dev and
/proc folders. The child process that becomes the container mounts all of these in its own mount namespace. The mounts
are not visible outside of the container, and disappear when the container ends.
"""

import contextlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from concertina.local.host import linux_namespaces

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "fuse")
_GPU_DEVICES = ("nvidia", "kfd", "dri", "infiniband")  # prefixes of names
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}


@dataclass(frozen=True)
class Mount:
    """File or folder of this machine that is mounted at `target` in a container."""

    source: str
    target: str
    read_only: bool = False


class RootFileSystem:
    """Builder of the root file system of one container."""

    def __init__(self, gpus: bool) -> None:
        self._gpus = gpus
        self._own: set[str] = set()  # folders in memory, created here, to which entries may be added
        self._volumes: set[str] = set()  # mounted volumes, below which entries may be added too

    def build(self, mounts: Sequence[Mount]) -> None:
        """Set up the root file system. In `mounts`, parent folders come before their children."""
        ordered = sorted(mounts, key=lambda mount: mount.target.rstrip("/").count("/"))
        # Open the sources first, because later mounts may cover their paths.
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
        if replaced:  # only now, because a detached mount can't be the source of a bind mount
            linux_namespaces.unmount("/.machine")
            os.rmdir("/.machine")

    def _make(self, target: str, is_folder: bool) -> None:
        """Create the mount point `target` if it does not exist. The machine's own folders are not changed."""
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
        """Mount a folder in memory over `folder`, and make the entries of `folder` visible in the new folder.

        Entries can then be added in the container, and the machine's folder is not changed.
        """
        old = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        mode = stat.S_IMODE(os.fstat(old).st_mode)
        names = os.listdir(folder)
        linux_namespaces.mount("tmpfs", folder, "tmpfs", 0, f"mode={mode:o}")
        for name in names:
            _show(f"/proc/self/fd/{old}/{name}", os.path.join(folder, name))
        os.close(old)
        self._own.add(folder)

    def _replace_root(self) -> None:
        """Replace / by a folder in memory that shows the entries of the old root.

        A replacement is needed because nothing can be mounted over / itself.
        """
        linux_namespaces.mount("tmpfs", "/tmp", "tmpfs", 0, "mode=755")
        os.mkdir("/tmp/.machine")
        linux_namespaces.pivot_root("/tmp", "/tmp/.machine")
        for name in os.listdir("/.machine"):
            _show(f"/.machine/{name}", f"/{name}")
        self._own.add("/")

    def _mount_dev(self) -> None:
        """Mount a /dev with harmless devices, as container runtimes do. GPU devices are added if they are requested."""
        gpu_prefixes = _GPU_DEVICES if self._gpus else ()
        device_names = [name for name in os.listdir("/dev") if name in _DEVICES or name.startswith(gpu_prefixes)]
        old = os.open("/dev", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        linux_namespaces.mount("tmpfs", "/dev", "tmpfs", linux_namespaces.MS_NOSUID, "mode=755,size=64k")
        for name in device_names:
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
        except OSError:  # without devpts there are no terminals, which nothing else needs
            pass
        self._own.add("/dev")


def mount_proc() -> None:
    """Mount a /proc that shows the processes of this pid namespace.

    If parts of /proc are hidden, as in Docker, the old /proc stays.
    """
    with contextlib.suppress(PermissionError):
        linux_namespaces.mount("proc", "/proc", "proc")


def _show(source: str, target: str) -> None:
    """Make the file, folder or link `source` visible at the path `target`, which must not exist yet."""
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
    except (PermissionError, FileNotFoundError):  # not accessible, or just deleted
        pass


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
