"""Guardian that tears a folder down when its owner is gone.

Usage: python -m concertina.local.state.guardian NAME < pipe of the owner. The kernel closes the pipe when the owner
ends, even by SIGKILL, and regardless of the thread that started the cluster.
"""

import sys

from concertina.local.state import lifetime


def main() -> None:
    """Wait until the owner ends, and tear its folder down."""
    sys.stdin.read()
    lifetime.end(sys.argv[1])


if __name__ == "__main__":
    main()
