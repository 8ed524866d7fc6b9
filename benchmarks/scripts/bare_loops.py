"""Training loops without a trainer, of the same decoder and data: `bare_loops.py fsdp2` and `bare_loops.py nanogpt`.

On a GPU, both compute in bfloat16 and are compiled.

The first loop is that of PyTorch's tutorial on FSDP2. The second one has the parts of nanoGPT's loop on one process: no
sharding, batches at random positions of a memory map, a cosine learning rate, and clipped gradients. The environment
variables MODEL (the model's configuration), ROWS (sequences in a step), TOKENS (a file of bytes) and ACTIVATIONS (those
to keep) configure both.
"""

from __future__ import annotations

import json
import math
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from in_turn import Turn
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from concertina_trainer.config.memory_config import Activations
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.model.decoder import Decoder

RATE, LEAST_RATE, WARM_UP, STEPS = 1e-3, 1e-4, 100, 10**6
DECAY, LIMIT, BETAS = 0.1, 1.0, (0.9, 0.95)

config, rows = ModelConfig.model_validate_json(os.environ["MODEL"]), json.loads(os.environ["ROWS"])
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
cuda = device.type == "cuda"
weights = torch.full((rows, config.sequence_length), 1 / rows / config.sequence_length, device=device)


def batch(data: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, each `[rows, length]`, from random positions of the data."""
    length = config.sequence_length
    starts = torch.randint(len(data) - length - 1, (rows,))
    read = torch.stack([torch.from_numpy(data[start : start + length + 1].astype(np.int64)) for start in starts])
    read = read.pin_memory().to(device, non_blocking=True) if cuda else read
    return read[:, :-1], read[:, 1:]


def decoder() -> Decoder:
    with device:
        model = Decoder(config, activations=Activations(os.environ["ACTIVATIONS"]))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def fsdp2(turn: Turn, data: np.ndarray) -> None:
    dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = decoder()
    policy = MixedPrecisionPolicy(torch.bfloat16 if cuda else None, torch.float32, cast_forward_inputs=False)
    for block in model.blocks.values():
        if cuda:
            block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY, fused=True)
    count = sum(parameter.numel() for parameter in model.parameters())
    while True:
        tokens, targets = batch(data)
        loss = model(tokens, None, targets, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        turn.step(total.item(), count)


def nanogpt(turn: Turn, data: np.ndarray) -> None:
    model = decoder()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, fused=cuda)
    forward = torch.compile(model) if cuda else model
    count, step = sum(parameter.numel() for parameter in model.parameters()), 0
    tokens, targets = batch(data)
    while True:
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step)
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            loss = forward(tokens, None, targets, weights)
        tokens, targets = batch(data)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        turn.step(loss.item(), count)


def rate_of(step: int) -> float:
    if step < WARM_UP:
        return RATE * (step + 1) / (WARM_UP + 1)
    return LEAST_RATE + (RATE - LEAST_RATE) * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP))) / 2


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    turn, data = Turn(), np.memmap(os.environ["TOKENS"], dtype=np.uint8, mode="r")
    turn.build()
    {"fsdp2": fsdp2, "nanogpt": nanogpt}[sys.argv[1]](turn, data)


main()
