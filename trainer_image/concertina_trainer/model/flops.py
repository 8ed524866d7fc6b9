"""Floating-point operations that training a token takes, and the peak rates of devices.

The module imports torch only to ask for a device's name. An MFU is comparable with another one only if both count
operations in the same way (decision "MFU counts operations like FlopCounterMode"):

- Matrix products count 2 operations for each weight and token in the forward pass and 4 in the backward pass. A frozen
  weight counts 2 in the backward pass (for the gradient of its input), or none if no trained weight comes before it.
- Attention counts 12 x heads x headDim x length for each layer and token when every token attends to all tokens of its
  sequence, as torchtitan and torch's `FlopCounterMode` count it. The trainer's own MFU counts half of that, because
  attention is causal, and less in layers with an attention window.
- Embedding lookups, norms and elementwise operations count nothing.
- Recomputation in the backward pass counts nothing for the MFU. For the HFU (hardware FLOPs utilization), the products
  that activation checkpointing repeats count (`recomputed_flops`). The scores of attention that a flash kernel computes
  again in its backward pass count for neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from concertina_trainer.config.memory_config import Activations
from concertina_trainer.config.model_config import FEED_FORWARD, ModelConfig, Projection
from concertina_trainer.config.optimizer_kinds import ITERATIONS

if TYPE_CHECKING:
    import torch

PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A800-SXM4-80GB": 312e12,
    "NVIDIA A800 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,  # SXM
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H800": 989e12,  # SXM
    "NVIDIA H200": 989e12,  # SXM
    "NVIDIA H200 NVL": 836e12,
    "NVIDIA H20": 148e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA GH200 144G HBM3e": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA B300 SXM6 AC": 2250e12,
    "NVIDIA GB300": 2500e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "AMD Instinct MI300X": 1307e12,
}
"""Peak rates of devices in dense bfloat16 operations per second, keyed by the name that the driver reports.

The rates are from the vendors' data sheets. A name must match exactly, because variants of one chip differ by up to a
quarter. A MIG slice of a chip has the name of the whole chip.
"""

IN_ORDER = (
    (Projection.query, Projection.key, Projection.value),
    (Projection.output,),
    (Projection.gate, Projection.up),
    (Projection.down,),
)
"""Matrices of a block in the order of computation. Matrices with the same input form one entry."""


def peak_flops(device: torch.device) -> float | None:
    """Return the peak rate of a device in operations per second, or None if PEAK_FLOPS does not list the device."""
    import torch  # `concertina plan` counts operations without it

    return PEAK_FLOPS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def orthogonalization_flops(rows: int, columns: int) -> float:
    """Return the number of operations with which Muon orthogonalizes one matrix. The MFU excludes them."""
    short, long = sorted((rows, columns))
    return ITERATIONS * (4.0 * short * short * long + 2.0 * short**3)


def token_flops(config: ModelConfig, full_attention: bool = False) -> float:
    """Return the number of operations of the forward and backward pass for one token.

    If `full_attention` is True, attention also counts the pairs of tokens that the causal mask hides, as torchtitan
    does.
    """
    frozen = config.multiplied_weights - config.multiplied_lora_weights if config.lora else 0
    unreached, attends = _before_the_first_adapter(config)
    products = 6.0 * config.multiplied_weights - 2.0 * (frozen + unreached)
    keys = _keys(config, full_attention)
    return products + 4.0 * config.query_dim * (3 * sum(keys) - 2 * attends * keys[0])


def recomputed_flops(config: ModelConfig, activations: Activations, full_attention: bool = False) -> float:
    """Return the number of operations for one token that activation checkpointing repeats in the backward pass.

    KeepProducts keeps the results of all matrix products and of attention, so it repeats none of these operations.
    Recompute repeats the forward pass of each block up to the last tensor that the backward pass needs. The last
    product of a block is therefore not repeated if its result goes only to the residual stream. `full_attention` has
    the same meaning as in `token_flops`.
    """
    if activations is not Activations.recompute:
        return 0.0
    in_blocks = config.multiplied_weights - config.vocab_size * config.dim
    not_repeated = sum(_last_product(config, layer) for layer in range(config.layers))
    return 2.0 * (in_blocks - not_repeated) + 4.0 * config.query_dim * sum(_keys(config, full_attention))


def _last_product(config: ModelConfig, layer: int) -> int:
    """Return the number of weights in the last matrix of a block, or 0 if a norm or a factor changes its result.

    Factors are the scores of a token's experts and the gate of shared experts.
    """
    routed = config.experts is not None and config.routed(layer)
    plain_shared = config.experts is not None and config.experts.shared > 0 and not config.experts.shared_gate
    if config.post_norms or (routed and not plain_shared):
        return 0
    if config.lora is not None and Projection.down in config.lora.targets:
        return config.lora.rank * config.dim
    return (config.shared_width if routed else config.resolved_hidden_dim) * config.dim


def _keys(config: ModelConfig, full_attention: bool) -> list[float]:
    """Return the number of tokens to which a token attends in each layer, averaged over the sequence's positions.

    If `full_attention` is True, the number is the length of the sequence.
    """
    length, keys = config.sequence_length, []
    for layer in range(config.layers):
        window = config.window_of(layer)
        size = length if window is None else min(window.size, length)
        keys.append(float(length) if full_attention else size - size * size / (2 * length))
    return keys


def _before_the_first_adapter(config: ModelConfig) -> tuple[int, int]:
    """Return the numbers of weights and of attention layers before the first adapter.

    The backward pass computes no gradient of the input of these weights, and none of the attention of these layers,
    because it ends at the first trained weight. Without adapters, the first trained weight is the embedding, so both
    numbers are 0. With adapters, the backward pass ends in the first block.
    """
    if config.lora is None:
        return 0, 0
    weights, attends = 0, 0

    def shape(projection: Projection) -> tuple[int, int]:
        """Return the shape of a matrix in the first block.

        All experts of a token together count as one feed-forward.
        """
        inputs, outputs = config.shape(projection)
        if projection not in FEED_FORWARD or not config.routed(0):
            return inputs, outputs
        return (config.token_width, outputs) if projection is Projection.down else (inputs, config.token_width)

    for number, stage in enumerate(IN_ORDER):
        trained = [projection for projection in stage if projection in config.lora.targets]
        weights += sum(inputs * outputs for inputs, outputs in map(shape, stage))
        weights += sum(config.lora.rank * shape(projection)[0] for projection in trained)
        if trained:
            attends = int(number > 0)
            break
    return weights, attends
