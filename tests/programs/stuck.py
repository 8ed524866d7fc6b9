"""Script that uses `trainingjob`. Rank 1 hangs in step 20, and the others wait for it, as in a collective."""

import os
import time

import trainingjob

PARENT = os.getppid()
"""Parent process. The script ends without it, because a test kills its agents, and with them a shell that runs the
script."""


def wait_for_what_never_comes():
    while os.getppid() == PARENT:
        time.sleep(0.05)


def wait_for_the_others():
    while os.getppid() == PARENT:
        time.sleep(0.05)


for step in range(1, 20):
    trainingjob.report(step=step)
    time.sleep(0.01)
if trainingjob.world().rank == 1:
    wait_for_what_never_comes()
trainingjob.report(step=20)
wait_for_the_others()
