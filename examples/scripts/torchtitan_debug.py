"""torchtitan's debug model and trainer with torchtitan's own checkpoints, on generated text.

torchrun --standalone --nproc-per-node 2 torchtitan_debug.py --checkpoints /tmp/titan
"""

# ruff: noqa: E402 (what is changed for a CPU stands before the imports)
import argparse
import collections
import dataclasses
import json
import os
import tempfile
import types
from pathlib import Path

import torch

CUDA = torch.cuda.is_available()
if not CUDA:  # torchtitan takes "cuda" for granted, and asks for its memory
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.current_device = lambda: 0
    torch.cpu.get_device_name = lambda device=None: "cpu"
    torch.cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=2**34)
    torch.cpu.memory_stats = lambda device=None: collections.defaultdict(int)
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None

from datasets import load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_mask
from torchtitan.config import ConfigManager
from torchtitan.hf_datasets import text_datasets
from torchtitan.models.common.attention import FlexAttention
from torchtitan.tools.logging import init_logger


def attend(q, k, v, *, block_mask, scale, enable_gqa, **_):
    """Compute the same as FlexAttention, which has no backward pass on a CPU."""
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), None


def divide_after_summing(module: FSDPModule, factor: float) -> None:
    """Divide gradients after their summation, because gloo can't multiply while it sums."""
    set_factor(module, factor)
    module.set_force_sum_reduction_for_comms(True)


if not CUDA:
    FlexAttention._compiled_flex_attn = attend
    set_factor, FSDPModule.set_gradient_divide_factor = FSDPModule.set_gradient_divide_factor, divide_after_summing


def make_assets(folder: Path) -> None:
    """Create a byte tokenizer and some text, in the place of the files in torchtitan's repository."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate([*letters, "<begin>", "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    marks = {"bos_token": "<begin>", "eos_token": "<end>", "add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(marks))
    lines = (json.dumps({"text": f"{number} and then {number + 1} " * 40}) for number in range(400))
    (folder / "text.json").write_text("\n".join(lines))
    known = text_datasets.DATASETS["c4_test"]
    loader = lambda path: load_dataset("json", data_files=path, split="train", cache_dir=str(folder))  # noqa: E731
    text_datasets.DATASETS["c4_test"] = dataclasses.replace(known, path=str(folder / "text.json"), loader=loader)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder that all replicas see")
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assets = Path(tempfile.mkdtemp())
    make_assets(assets)
    told = options.checkpoints / "world"  # torchtitan's places in the data are of ranks: another world begins anew
    resized = told.exists() and int(told.read_text()) != world
    init_logger()
    trainer = (
        ConfigManager()
        .parse_args(
            [
                *("--module", "llama3", "--config", "llama3_debugmodel", "--hf_assets_path", str(assets)),
                *("--training.seq_len", "64", "--training.local_batch_size", "2"),
                *("--training.steps", str(options.steps), "--validator.no-enable"),
                *("--dump_folder", str(options.checkpoints), "--checkpoint.enable", "--checkpoint.keep_latest_k", "3"),
                *("--checkpoint.interval", str(options.save_every)),
                *(("--checkpoint.exclude_from_loading", "dataloader") if resized else ()),
            ]
        )
        .build()
    )
    load, save = trainer.checkpointer.load, trainer.checkpointer.save

    def load_and_tell(step: int) -> None:
        load(step=step)
        print(f"rank {rank} of {world} starts at step {trainer.step}", flush=True)

    def save_and_tell(step: int, last_step: bool = False) -> None:
        save(step, last_step=last_step)
        if rank == 0 and step % options.save_every == 0:
            told.with_suffix(".new").write_text(str(world))
            told.with_suffix(".new").replace(told)
            print(f"saved step {step}", flush=True)

    trainer.checkpointer.load, trainer.checkpointer.save = load_and_tell, save_and_tell
    trainer.train()
    trainer.close()
    print(f"rank {rank} of {world} is through at step {options.steps}", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # the interpreter's own end may abort while gloo's threads free their tensors (pytorch#190489)
