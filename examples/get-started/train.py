import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trainingjob  # 1

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = trainingjob.State(model=model, optimizer=optimizer)  # 2
steps = 300
for step in range(state.restore(default=0), steps):  # 3
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step * world + rank))
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.05)  # the work of a larger model
    state.commit(step, durable=step == steps - 1)  # 4
print(f"rank {rank} of {world} is done", flush=True)
os._exit(0)  # a process that ends in this way does not abort while gloo's threads run
