"""Guardian process that ends a cluster's processes and deletes its files when the command that owns it is gone.

Usage: python -m concertina.local.state.guardian NAME < PIPE. The owner holds the other end of the pipe. The kernel
closes that end when the owner ends, even by SIGKILL, and regardless of the thread that started the cluster.
"""

import sys

from concertina.local.state import lifetime


def main() -> None:
    """Wait until the owner ends, then kill the cluster's processes and delete its files."""
    sys.stdin.read()
    lifetime.end(sys.argv[1])


if __name__ == "__main__":
    main()
