# This file runs first in agent.pyz, in whatever Python the image has. It must run in all versions from 2.7 on, so that
# it can tell the user of an old Python what to do.
import sys

OLDEST = (3, 9)
EXIT = 69  # protocol.EXIT_OLD_PYTHON


def refuse():
    # type: () -> int
    need = "%d.%d" % OLDEST
    have = "%d.%d.%d" % tuple(sys.version_info[:3])
    problem = "the agent needs Python %s or newer, and %s is Python %s" % (need, sys.executable, have)
    problem += (
        ": set the variable CONCERTINA_PYTHON of the container trainer to a newer one's path, or use another image"
    )
    sys.stderr.write(problem + "\n")
    try:
        with open("/dev/termination-log", "w") as log:
            log.write(problem)
    except (IOError, OSError):
        pass
    return EXIT


if __name__ == "__main__":
    if sys.version_info[:2] < OLDEST:
        sys.exit(refuse())
    from concertina_agent.main import main

    sys.exit(main())
