"""Hugging Face Trainer on a tiny Llama, with its state saved by `trainingjob`.

torchrun --standalone --nproc-per-node 2 hf_trainer_state.py
"""

import argparse
import os

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import trainingjob.transformers


class Numbers(Dataset):
    """Sequences of consecutive numbers, each beginning at its own index."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict:
        ids = (torch.arange(16) + index) % 64
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        max_steps=options.steps,
        per_device_train_batch_size=48 // trainingjob.world().size,  # 48 by all ranks, in any world
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Numbers())
    trainingjob.transformers.train(trainer)  # instead of trainer.train()
    print(f"rank {arguments.process_index} is through at step {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # the interpreter's own end may abort while gloo's threads free their tensors (pytorch#190489)
