"""A script that uses `trainingjob`: rank 1 gets stuck in step 20, and the others wait for it, as a collective would."""

import time

import trainingjob


def wait_for_what_never_comes():
    while True:
        time.sleep(0.05)


def wait_for_the_others():
    while True:
        time.sleep(0.05)


for step in range(1, 20):
    trainingjob.report(step=step)
    time.sleep(0.01)
if trainingjob.world().rank == 1:
    wait_for_what_never_comes()
trainingjob.report(step=20)
wait_for_the_others()
