"""Faults in the bundled trainer, for tests. The file named by FAULT says which rank does what, as soon as it exists.

1 read_forever        rank 1's reader waits as long as the file exists
0 read_slowly 0.3     rank 0's reader takes so many additional seconds for each step's sequences
0 leak 4000000        rank 0 keeps so many additional bytes of each forward pass
0 compute_forever     rank 0 computes in the forward pass as long as the file exists
2 slow 0.2            rank 2 takes so many additional seconds for each step's forward pass
1 heavy 0.02          rank 1 takes so many additional seconds for each sequence
0 memory_is_lost      rank 0 can't restore anything from node memory

PACE: additional seconds of every rank for a forward pass. It is for jobs that train until their test is over, which
would otherwise take all processor time. PACE_WHILE: path of a file; PACE applies only while the file exists.
LINE_DELAY: additional seconds that gloo's messages between two ranks take.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time


def _fault(*names):
    try:
        with open(os.environ["FAULT"]) as file:
            rank, name, *arguments = file.read().split()
    except (KeyError, OSError, ValueError):
        return None
    return arguments if rank == os.environ.get("RANK") and name in names else None


LEAKED = []


def read_forever(*_):
    if arguments := _fault("read_slowly"):
        time.sleep(float(arguments[0]))
    while _fault("read_forever") is not None:
        time.sleep(0.05)


def compute_forever(_, tokens, *others):
    if os.path.exists(os.environ.get("PACE_WHILE", "/")):
        time.sleep(float(os.environ.get("PACE", 0)))
    while _fault("compute_forever") is not None:
        time.sleep(0.05)
    if arguments := _fault("slow"):
        time.sleep(float(arguments[0]))
    if arguments := _fault("leak"):
        LEAKED.append(b"x" * int(arguments[0]))
    if arguments := _fault("heavy"):
        time.sleep(float(arguments[0]) * len(tokens))


def memory_is_lost(*_):
    from concertina_state.errors import RestoreFailed

    if _fault("memory_is_lost") is not None:
        raise RestoreFailed("node memory is lost, as a test wants it")


def slow_line(module):
    if "LINE_DELAY" in os.environ:
        import relays

        module.ProcessGroupGloo = relays.between_ranks(module.ProcessGroupGloo)


def _before(owner, name, act):
    original = getattr(owner, name)

    def changed(*args, **kwargs):
        act(*args)
        return original(*args, **kwargs)

    setattr(owner, name, changed)


PATCHES = {
    "concertina_trainer.data.read.sequence_reader": lambda module: _before(module.Reader, "sequences", read_forever),
    "concertina_trainer.model.decoder": lambda module: _before(module.Decoder, "forward", compute_forever),
    "concertina_trainer.model.own": lambda module: _before(module.OwnModel, "forward", compute_forever),
    "torch.distributed.distributed_c10d": slow_line,
    "concertina_trainer.state.restore": lambda module: _before(module.InMemory, "open", memory_is_lost),
}


class Patching(importlib.abc.MetaPathFinder):
    """Import hook that patches a module when it is first imported."""

    def find_spec(self, name, path, target=None):
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load, patch = spec.loader.exec_module, PATCHES[name]

        def exec_module(module):
            load(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


if "FAULT" in os.environ or "PACE" in os.environ:
    sys.meta_path.insert(0, Patching())

if "CLOCK_OFF_BY" in os.environ:
    _time = time.time
    time.time = lambda: _time() + float(os.environ["CLOCK_OFF_BY"])
