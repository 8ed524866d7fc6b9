"""Script without torch that uses `trainingjob`. Its ranks synchronize by files, as a collective would."""

import os
import sys
import time
from pathlib import Path

import trainingjob

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
world = trainingjob.world()
marks = folder / f"round-{world.round}"
marks.mkdir(exist_ok=True)
newest = folder / "saved"
start = int(newest.read_text()) if newest.exists() else 0
print(f"rank {world.rank} of {world.size} starts at step {start}", flush=True)
for step in range(start, steps):
    (marks / f"{step}-{world.rank}").touch()
    while any(not (marks / f"{step}-{rank}").exists() for rank in range(world.size)):
        time.sleep(0.001)
    time.sleep(0.002 * (1 + (step + world.rank) % world.size))  # Ranks never arrive at exactly the same time.
    told = {"tokens": 10 * (step + 1), "metrics": {"learning_rate": 0.5}}
    trainingjob.report(step=step + 1, steps=steps, loss=1 / (step + 1), tokens_per_second=7.0, **told)
    if trainingjob.should_checkpoint():
        print(f"rank {world.rank} saves step {step + 1}", flush=True)
        if world.rank == 0:
            newest.with_suffix(".new").write_text(str(step + 1))
            os.replace(newest.with_suffix(".new"), newest)
print(f"rank {world.rank} is through", flush=True)
