"""Training without torch, by numpy or by the standard library alone.

All ranks hold the weights, and each rank has some rows of the momentum. The batch and the loss are the same in any
world. Ranks communicate over a socket of their own.
"""

import argparse
import array
import os
import struct
import sys
import time
from multiprocessing.connection import Client, Connection, Listener

import trainingjob

BATCH, FEATURES = 12, 23
WORLD = trainingjob.world()


class Star:
    """Star-shaped connections with rank 0 in the centre."""

    def __init__(self) -> None:
        self.others: list[Connection] = []
        if WORLD.size == 1:
            return
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if WORLD.rank == 0:
            self.listener = Listener(place, authkey=b"arrays", backlog=64)
            found = {(each := self.listener.accept()).recv(): each for _ in range(WORLD.size - 1)}
            self.others = [found[rank] for rank in sorted(found)]
        else:
            self.others = [connected(place)]
            self.others[0].send(WORLD.rank)

    def gather(self, data: bytes) -> list[bytes]:
        if WORLD.rank != 0:
            self.others[0].send(data)
            return self.others[0].recv()
        found = [data, *(each.recv() for each in self.others)]
        for each in self.others:
            each.send(found)
        return found


def connected(place: tuple[str, int]) -> Connection:
    for _ in range(600):
        try:
            return Client(place, authkey=b"arrays")
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise SystemExit(f"nobody listens at {place}")


def numbers(seed: int, count: int) -> list[float]:
    """Return numbers in [-1, 1), the same on any machine."""
    values = []
    for _ in range(count):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        values.append(seed / 2**63 - 1)
    return values


def new(library: str, count: int):
    if library == "numpy":
        import numpy

        return numpy.zeros(count)
    return array.array("d", bytes(8 * count))


def rows(rank: int) -> range:
    return range(FEATURES * rank // WORLD.size, FEATURES * (rank + 1) // WORLD.size)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=["numpy", "standard"], default="numpy")
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--pause", type=float, default=0.01)
    parser.add_argument("--wrong", choices=["", "differs", "part", "gather"], default="")
    options = parser.parse_args()
    star, mine = Star(), rows(WORLD.rank)
    weights, momentum = new(options.library, FEATURES), new(options.library, len(mine))
    if options.wrong == "differs":
        weights[0] = WORLD.rank
    part = trainingjob.ArrayShard(momentum, [mine.start + (options.wrong == "part")], [FEATURES])
    kept = {"weights": weights, "momentum": part, "seen": 0}
    gather = (lambda data: [data]) if options.wrong == "gather" else star.gather
    state = trainingjob.State(kept=kept, gather=gather if WORLD.size > 1 else None, overhead=1000.0)
    start = state.restore(default=0)
    print(f"rank {WORLD.rank} of {WORLD.size} starts at step {start}", flush=True)
    share = range(BATCH * WORLD.rank // WORLD.size, BATCH * (WORLD.rank + 1) // WORLD.size)
    for step in range(start, options.steps):
        gradient, loss = [0.0] * FEATURES, 0.0
        for item in share:
            x = numbers(step * BATCH + item + 1, FEATURES)
            error = sum(a * b for a, b in zip(x, weights, strict=True)) - sum(x)
            loss += error * error / BATCH
            gradient = [g + 2 * error * each / BATCH for g, each in zip(gradient, x, strict=True)]
        form = f"{FEATURES + 1}d"
        of_all = [struct.unpack(form, each) for each in star.gather(struct.pack(form, loss, *gradient))]
        loss, *gradient = map(sum, zip(*of_all, strict=True))
        for place, row in enumerate(mine):
            momentum[place] = 0.9 * momentum[place] + gradient[row]
        for rank, each in enumerate(star.gather(struct.pack(f"{len(mine)}d", *momentum))):
            for row, moved in zip(rows(rank), struct.unpack(f"{len(rows(rank))}d", each), strict=True):
                weights[row] -= 0.02 * moved
        kept["seen"] += BATCH
        assert kept["seen"] == (step + 1) * BATCH
        if WORLD.rank == 0:
            print(f"step {step} loss {loss:.9f}", flush=True)
        time.sleep(options.pause)
        state.commit(step, durable=step == options.steps - 1)
    assert not {"torch"} & set(sys.modules)
    assert options.library == "numpy" or "numpy" not in sys.modules
    print(f"rank {WORLD.rank} is through", flush=True)


if __name__ == "__main__":
    main()
