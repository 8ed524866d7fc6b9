"""Compute logits by torchtitan's own Llama from a checkpoint of torchtitan, on a CPU.

Usage: titan_logits.py FOLDER OUT. It writes the tokens, their logits, and moments to OUT.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "scripts"))

import torch
import torch.distributed.checkpoint as dcp
import torchtitan_debug  # noqa: F401 (changes torchtitan for a CPU)
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.models.llama3 import model_registry


def main(folder: str, out: str) -> None:
    config = model_registry("debugmodel").model
    model = config.build()
    weights = model.state_dict()
    dcp.load(weights, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(weights)
    tokens = torch.arange(2 * 48).view(2, 48) * 37 % 2048
    with torch.no_grad():
        causal = create_block_mask(lambda b, h, q, k: q >= k, 2, None, 48, 48, device="cpu")
        logits = model(tokens, attention_masks=causal)
    torch.save((tokens, logits, moments_of(model, folder)), out)


def moments_of(model, folder: str) -> dict[str, torch.Tensor]:
    """Return the first moments of layer 3's queries, keys and values, separated as torchtitan separates weights."""
    attention = model.layers["3"].attention.qkv_linear
    key = "optimizer.state.layers.3.attention.qkv_linear.wqkv.weight.exp_avg"
    found = {key: torch.zeros_like(attention.wqkv.weight.detach())}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    with torch.no_grad():
        attention.wqkv.weight.copy_(found[key])
    return {name.split(".")[0]: value.detach() for name, value in attention.state_dict().items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
