"""Linux namespaces and mounts, through the C library. Python has os.unshare since version 3.12, but no mount."""

import ctypes
import os
import signal
from pathlib import Path

from concertina.local.errors import LocalClusterError

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

FORBIDDEN = """this machine does not let concertina make the namespaces that pods run in ({error}).
Allow it for users: `sudo sysctl -w kernel.unprivileged_userns_clone=1` (Debian),
`sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` (Ubuntu 23.10 and newer),
`sudo sysctl -w user.max_user_namespaces=10000` (elsewhere). In a container: start it with
`--security-opt seccomp=unconfined --security-opt apparmor=unconfined`, or `--privileged`."""

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, operation: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{operation}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces. A new pid namespace (CLONE_NEWPID) applies to later children instead."""
    _check(_libc.unshare(flags), "unshare")


def setns(descriptor: int, flags: int) -> None:
    """Move this process into the namespaces of a descriptor (a namespace file, or the pidfd of a process)."""
    _check(_libc.setns(descriptor, flags), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Mount a file system, by the system call mount(2)."""
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(result, f"mount {kind or source} on {target}")


def unmount(target: str) -> None:
    """Detach a mount from the folder tree at once. The kernel frees the mount when nothing uses it any more."""
    _check(_libc.umount2(target.encode(), _MNT_DETACH), f"unmount {target}")


def bind(source: str, target: str, read_only: bool = False) -> None:
    """Mount a file or folder at the target, with everything that is mounted below it (a bind mount)."""
    mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        # A user namespace may not remove these flags.
        locked_flags = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
        mount("none", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY | locked_flags)


def pivot_root(new_root: str, old_root: str) -> None:
    """Make the mount `new_root` the root directory. The old root is then visible at `old_root` below it."""
    number = _SYS_PIVOT_ROOT[os.uname().machine]
    _check(_libc.syscall(number, new_root.encode(), old_root.encode()), "pivot_root")
    os.chdir("/")


def sethostname(name: str) -> None:
    raw = name.encode()
    _check(_libc.sethostname(raw, len(raw)), "sethostname")


def die_with_parent() -> None:
    """Make the kernel send SIGKILL to this process when its parent process ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def enter_node() -> None:
    """Move this process into a new mount namespace, and its later children into a new pid namespace.

    If the process is not root, it also moves into a new user namespace.

    Raises:
        LocalClusterError: When the machine does not allow new namespaces. The message says what to do.
    """
    try:
        if os.geteuid() == 0:
            try:
                unshare(CLONE_NEWNS | CLONE_NEWPID)
            except PermissionError:  # root in a container that lacks the capability
                _enter_user_namespace()
        else:
            _enter_user_namespace()
        mount("none", "/", flags=MS_REC | MS_PRIVATE)
    except OSError as error:
        raise LocalClusterError(FORBIDDEN.format(error=error.strerror)) from error


def _enter_user_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
