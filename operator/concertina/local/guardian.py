"""Takes a cluster down when its owner is gone, however it went: python -m concertina.local.guardian NAME < pipe of the owner.

The kernel closes the pipe when the owner ends, be it by SIGKILL, from whatever thread it started the cluster.
"""

import sys

from concertina.local import cluster


def main() -> None:
    sys.stdin.read()
    cluster.down(sys.argv[1])


if __name__ == "__main__":
    main()
