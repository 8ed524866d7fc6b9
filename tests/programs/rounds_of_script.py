"""`stateful.py` as a function that `trainingjob.run` calls in each round, with what a round must not leave behind."""

import os
import sys

import stateful

import trainingjob

if __name__ == "__main__":
    trainingjob.run(stateful.main)
