"""Plain FSDP2 script of the same model for torchrun, as in torch's tutorials.

`scaling.py` compares concertina with it.
"""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist
from notes import Notes
from torch.distributed.fsdp import fully_shard

from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.model.decoder import Decoder


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config, rows = ModelConfig.model_validate_json(os.environ["MODEL"]), json.loads(os.environ["ROWS"])
    model = Decoder(config)
    for block in model.blocks.values():
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    notes, ended = Notes(), False
    while not ended:
        tokens = torch.randint(0, config.vocab_size, (rows, config.sequence_length + 1))
        weights = torch.full((rows, config.sequence_length), 1 / rows / config.sequence_length)
        loss = model(tokens[:, :-1], None, tokens[:, 1:], weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        total.item()  # as any script that logs its loss does
        ended = notes.add()
    dist.barrier()
    dist.destroy_process_group()


main()
