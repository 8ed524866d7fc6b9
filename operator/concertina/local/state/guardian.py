"""Guardian process: stops a cluster and deletes its files when the command that owns the cluster has ended.

Usage: python -m concertina.local.state.guardian NAME < PIPE. The command holds the other end of the pipe. When the
command ends, even by SIGKILL, the kernel closes that end, whichever thread started the cluster.
"""

import sys

from concertina.local.state import lifetime


def main() -> None:
    """Wait until the owner ends, then kill the cluster's processes and delete its files."""
    sys.stdin.read()
    lifetime.end(sys.argv[1])


if __name__ == "__main__":
    main()
