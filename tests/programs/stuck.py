"""A script that uses `trainingjob`: rank 1 gets stuck in step 20, and the others wait for it, as a collective would."""

import os
import time

import trainingjob

PARENT = os.getppid()
"""Without which it ends: a test's agents are killed, and a shell that ran this with them."""


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
