"""torchtitan's trainer of a model with the shape of MODEL, which trains in turns with other processes.

Everything but the shape is torchtitan's debug model and its defaults, without validation. ACTIVATIONS selects the
activation checkpointing: none for Keep, selective for KeepProducts, or full for Recompute.
`examples/scripts/torchtitan_debug.py` makes torchtitan run on a CPU, and provides text and a tokenizer. On a GPU, the
model is compiled.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "scripts"))

import torch
import torchtitan_debug
from in_turn import Turn
from torch.nn.attention.flex_attention import create_mask
from torchtitan.config import ConfigManager
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention
from torchtitan.trainer import Trainer

CHECKPOINTING = {"Keep": None, "KeepProducts": SelectiveAC.Config(), "Recompute": FullAC.Config()}
SHAPE, ROWS = json.loads(os.environ["MODEL"]), json.loads(os.environ["ROWS"])
masks: dict[int, tuple[Any, Any]] = {}
"""Mask of the present step by the identity of its block mask, with the block mask."""


def attend(q: Any, k: Any, v: Any, *, block_mask: Any, scale: float | None, enable_gqa: bool, **_: Any) -> Any:
    """Compute the same as FlexAttention, and make the mask once a step as torchtitan makes the block mask."""
    if id(block_mask) not in masks:
        masks.clear()
        mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
        masks[id(block_mask)] = mask, block_mask
    mask, _ = masks[id(block_mask)]
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), None


def model(width: int, vocabulary: int) -> Any:
    heads = SHAPE["heads"]
    return llama3.Llama3Model.Config(
        dim=width,
        vocab_size=vocabulary,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=width, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=width, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=width, out_features=vocabulary, param_init=llama3._output_linear_init(width)),
        layers=llama3._build_llama3_layers(
            n_layers=SHAPE["layers"],
            dim=width,
            n_heads=heads,
            n_kv_heads=SHAPE["kvHeads"],
            hidden_dim=SHAPE["hiddenDim"],
            rope=ComplexRoPE.Config(dim=width // heads, max_seq_len=SHAPE["sequenceLength"], theta=10000.0),
            attn_backend="flex",
        ),
    )


def main() -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    turn = Turn()
    if not torchtitan_debug.CUDA:
        FlexAttention._compiled_flex_attn = attend
    assets = Path(tempfile.mkdtemp(dir="."))
    torchtitan_debug.make_assets(assets)
    config = ConfigManager().parse_args(
        [
            *("--module", "llama3", "--config", "llama3_debugmodel", "--hf_assets_path", str(assets)),
            *("--training.seq_len", str(SHAPE["sequenceLength"]), "--training.local_batch_size", str(ROWS)),
            *("--training.steps", str(10**6), "--validator.no-enable", "--dump_folder", str(assets)),
        ]
    )
    config.activation_checkpoint = CHECKPOINTING[os.environ["ACTIVATIONS"]]
    config.compile.enable = torchtitan_debug.CUDA
    config.model_spec.model = model(SHAPE["dim"], SHAPE["vocabSize"])
    config.loss.loss_fn.global_vocab_size = SHAPE["vocabSize"]
    turn.build()
    trainer = config.build()
    weights = sum(parameter.numel() for parameter in trainer.model_parts[0].parameters())
    step, log = Trainer.train_step, trainer.metrics_processor.log
    loss = 0.0

    def noted(number: int, average: float, *others: Any, **named: Any) -> None:
        nonlocal loss
        loss = float(average)
        log(number, average, *others, **named)

    def in_turn(self: Trainer, batches: Any) -> None:
        step(self, batches)
        turn.step(loss, weights)

    trainer.metrics_processor.log, Trainer.train_step = noted, in_turn
    trainer.train()


main()
