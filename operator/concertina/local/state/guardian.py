"""Tears a folder down when its owner is gone: python -m concertina.local.state.guardian NAME < pipe of the owner.

The kernel closes the pipe when the owner ends, be it by SIGKILL, and whichever of its threads started the cluster.
"""

import sys

from concertina.local.state import lifetime


def main() -> None:
    sys.stdin.read()
    lifetime.end(sys.argv[1])


if __name__ == "__main__":
    main()
