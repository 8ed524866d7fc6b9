"""A GPT of Megatron-Core, tensor and data parallel, with Megatron's own checkpoints, which load into other worlds.

torchrun --standalone --nproc-per-node 4 megatron_core.py --tensor-model-parallel-size 2 --checkpoints /tmp/megatron
"""

import argparse
import contextlib
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if CUDA else torch.device("cpu")
if not CUDA:
    # Megatron asks for the GPU where its gradients lie, for its dropout's random numbers, and before it saves. Its
    # optimizers have tensors on "cuda", so torch's own is used here.
    torch.cuda.current_device, torch.cuda.synchronize = lambda: DEVICE, lambda: None
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
VOCABULARY, LENGTH, BATCH = 128, 32, 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder that all replicas see")
    return parser.parse_args()


def build(tensor: int) -> DistributedDataParallel:
    if CUDA:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if CUDA else "gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    if CUDA:
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=tensor,
        use_cpu_initialization=True,
        masked_softmax_fusion=CUDA,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH).to(DEVICE)
    return DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=False), model)


def sharded(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> dict:
    """Return the sharded tensors of this rank, with their places in the whole tensors, for Megatron's checkpoints."""
    weights = model.module.sharded_state_dict(prefix="model.")
    found = {"weights": weights, "optimizer": optimizer.state_dict()}
    parameters = get_param_id_to_sharded_param_map(weights, model.module.parameters())
    optim_state_to_sharding_state(found["optimizer"], parameters, exclude_keys=("step",))
    return found


def newest(folder: Path) -> int:
    """Return the step of the last complete checkpoint; 0 if there is none. Megatron writes metadata.json last."""
    return max((int(path.parent.name) for path in folder.glob("*/metadata.json")), default=0)


def main() -> None:
    options = arguments()
    model = build(options.tensor_model_parallel_size)
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for parameter in model.parameters():  # as after a step, so that a checkpoint finds its place
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    start = newest(options.checkpoints)
    dist.barrier()  # none has saved before all have looked
    if start:
        found = dist_checkpointing.load(sharded(model, optimizer), str(options.checkpoints / str(start)))
        model.module.load_state_dict({n.removeprefix("model."): each for n, each in found["weights"].items()})
        for state in found["optimizer"]["state"].values():
            state["step"] = torch.tensor(float(start))  # Megatron leaves it out
        optimizer.load_state_dict(found["optimizer"])
    print(f"rank {rank} of {world} starts at step {start}", flush=True)

    positions = torch.arange(LENGTH, device=DEVICE).expand(BATCH, LENGTH)
    unseen = torch.ones(1, 1, LENGTH, LENGTH, device=DEVICE).triu(1) > 0
    for step in range(start, options.steps):
        place = step * parallel_state.get_data_parallel_world_size() + parallel_state.get_data_parallel_rank()
        first = torch.randint(0, VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(place))
        tokens = ((first + torch.arange(LENGTH + 1)) % VOCABULARY).to(DEVICE)
        model.zero_grad_buffer()
        loss = model(tokens[:, :-1], positions, unseen, labels=tokens[:, 1:]).mean()
        loss.backward()
        finalize_model_grads([model])
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if (step + 1) % options.save_every == 0:
            path = options.checkpoints / str(step + 1)
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)  # of a save that was cut off
                path.mkdir(parents=True)
            dist.barrier()
            dist_checkpointing.save(sharded(model, optimizer), str(path))
            if rank == 0:
                print(f"saved step {step + 1}", flush=True)
                shutil.rmtree(options.checkpoints / str(step + 1 - 3 * options.save_every), ignore_errors=True)
    dist.barrier()
    print(f"rank {rank} of {world} is through at step {options.steps}", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # the interpreter's own end may abort while gloo's threads free their tensors (pytorch#190489)
