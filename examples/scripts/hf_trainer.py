"""Hugging Face Trainer on a tiny Llama, with save_steps, and resume_from_checkpoint for the last checkpoint.

torchrun --standalone --nproc-per-node 2 hf_trainer.py --checkpoints /tmp/hf
"""

import argparse
import os
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Numbers(Dataset):
    """Sequences of consecutive numbers, each beginning at its own index."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict:
        ids = (torch.arange(16) + index) % 64
        return {"input_ids": ids, "labels": ids}


class Tell(TrainerCallback):
    def on_train_begin(self, args, state, control, **_) -> None:
        print(f"rank {args.process_index} of {args.world_size} starts at step {state.global_step}", flush=True)

    def on_save(self, args, state, control, **_) -> None:
        if state.is_world_process_zero:
            print(f"saved step {state.global_step}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder that all replicas see")
    options = parser.parse_args()

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(options.checkpoints),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        lr_scheduler_type="constant",
        save_steps=options.save_every,
        save_total_limit=3,
        logging_steps=options.save_every,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Numbers(), callbacks=[Tell()])
    # Trainer's own choice (resume_from_checkpoint=True) may be one that was being written when the process was killed.
    whole = [path.parent for path in options.checkpoints.glob("checkpoint-*/trainer_state.json")]  # written last
    last = max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    rank, world = arguments.process_index, arguments.world_size
    print(f"rank {rank} of {world} is through at step {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # the interpreter's own end may abort while gloo's threads free their tensors (pytorch#190489)
