"""Script that does not use concertina: PyTorch's own loop, on two ranks by gloo.

    python unmodified.py          trains until it is killed
    python unmodified.py hang     rank 1 hangs after its 20th step
    python unmodified.py report   reports its steps by trainingjob, from step 1000 on

It ends with the process that started it.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

PARENT = os.getppid()
"""Parent process. The script ends without it, because a test kills its agents."""
mode = (*sys.argv, "")[1]


def wait_for_what_never_comes():
    while os.getppid() == PARENT:
        time.sleep(0.05)


world = int(os.environ["WORLD_SIZE"])
if world > 1:
    dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
if world > 1:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if mode == "report":
    import trainingjob
for step in range(1, 1_000_000):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if mode == "report":
        trainingjob.report(step=1000 + step)
    if mode == "hang" and step == 20 and os.environ["RANK"] == "1":
        wait_for_what_never_comes()
    time.sleep(0.02)
    if os.getppid() != PARENT:
        break
