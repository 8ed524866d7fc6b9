"""Run a command as an ordinary user without any rights: python as_nobody.py FOLDER... -- COMMAND...   (needs root)

The user can reach the folders, and the parts of this Python that the command needs, even if a folder above them (like
/root) is closed to other users. That is the case only in a mount namespace of this process.
"""

import os
import sys
from pathlib import Path

from concertina.local.host import linux_namespaces

NOBODY = 65534


def main() -> None:
    split = sys.argv.index("--")
    needed = {Path(sys.base_prefix), Path(sys.prefix), *map(Path, sys.argv[1:split])}
    linux_namespaces.unshare(linux_namespaces.CLONE_NEWNS)
    linux_namespaces.mount("none", "/", flags=linux_namespaces.MS_REC | linux_namespaces.MS_PRIVATE)
    for closed in {top for path in needed if (top := first_closed(path))}:
        inside = [path for path in needed if path.is_relative_to(closed)]
        opened = {path: os.open(path, os.O_PATH) for path in inside}
        linux_namespaces.mount("tmpfs", str(closed), "tmpfs", 0, "mode=755")
        for path, descriptor in opened.items():
            path.mkdir(parents=True, exist_ok=True)
            linux_namespaces.bind(f"/proc/self/fd/{descriptor}", str(path))
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    command = sys.argv[split + 1 :]
    os.execvp(command[0], command)


def first_closed(path: Path) -> Path | None:
    """Return the topmost folder above `path` that other users may not pass through, or None."""
    return next((folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001), None)


if __name__ == "__main__":
    main()
