"""Program of forked workers that save the whole gradient of one global batch in each of several rounds.

The rounds follow one another in the same processes. ROUNDS has a list for each round: the rank of each process, in the
order of their ranks in the first round, or null if the process has ended before. The first process saves the results,
each with the number of sockets that the round has left open.
"""

import contextlib
import gc
import json
import os

import torch
from workers import gradients

from concertina_state import process_groups


def main() -> int:
    gradients.prepare()
    process, results, before = int(os.environ["RANK"]), [], sockets()
    for number, ranks in enumerate(json.loads(os.environ["ROUNDS"]), 1):
        if ranks[process] is None:
            return 0
        size = sum(rank is not None for rank in ranks)
        os.environ |= {"CONCERTINA_ROUND": str(number), "RANK": str(ranks[process]), "WORLD_SIZE": str(size)}
        results.append(gradients.of_round())
        process_groups.leave()
        gc.collect()
        results[-1]["sockets"] = sockets() - before
    if process == 0:
        torch.save(results, os.environ["RESULT"])
    return 0


def sockets() -> int:
    """Return the number of open sockets of this process."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count
