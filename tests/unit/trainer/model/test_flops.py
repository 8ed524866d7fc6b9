"""Operations of a token, compared with torch's own count, and peak rates by the device's name."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from concertina_trainer.config.memory_config import Activations
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.flops import PEAK_FLOPS, peak_flops, recomputed_flops, token_flops

SMALL = {"layers": 3, "dim": 64, "heads": 4, "vocabSize": 512, "sequenceLength": 32}
LORA = {"rank": 8}
MODELS = {
    "tied": {},
    "untied": {"tieEmbeddings": False},
    "grouped queries": {"kvHeads": 1},
    "a long context": {"sequenceLength": 256},
    "a short context": {"sequenceLength": 8, "tieEmbeddings": False},
    "one layer": {"layers": 1},
    "wide heads, biases, norms": {"headDim": 32, "kvHeads": 2, "qkvBias": True, "qkNorm": True},
    "soft caps and post-norms": {"attentionSoftCap": 9.0, "logitSoftCap": 9.0, "postNorms": True, "normOffset": True},
    "wide heads with adapters": {"headDim": 32, "kvHeads": 2, "qkvBias": True, "lora": LORA},
    "experts": {"experts": {"count": 8, "activePerToken": 2, "hiddenDim": 32}},
    "experts beside dense layers": {
        "experts": {"count": 4, "shared": 1, "sharedGate": True, "firstDense": 1, "biasRate": 0.1}
    },
    "a shared expert": {"experts": {"count": 4, "shared": 1}},
    "gpt-oss": {
        "kvHeads": 2,
        "qkvBias": True,
        "outputBias": True,
        "experts": {"count": 4, "clampedSwiglu": {}},
    },
    "adapters of all matrices": {"lora": LORA},
    "adapters of experts": {"experts": {"count": 8, "activePerToken": 2, "hiddenDim": 32}, "lora": LORA},
    "adapters of a shared expert": {
        "experts": {"count": 4, "shared": 1, "firstDense": 1},
        "lora": {**LORA, "targets": ["Value", "Down"]},
    },
    "adapters of a shared expert with a gate": {
        "experts": {"count": 4, "shared": 1, "sharedGate": True},
        "lora": {**LORA, "targets": ["Value", "Down"]},
    },
    "adapters, untied": {"lora": LORA, "tieEmbeddings": False},
    "adapters of values": {"lora": {**LORA, "targets": ["Value"]}},
    "adapters of outputs": {"lora": {**LORA, "targets": ["Output"]}},
    "adapters of gates": {"lora": {**LORA, "targets": ["Gate"]}},
    "adapters of the last matrix": {"lora": {**LORA, "targets": ["Down"]}, "layers": 1},
}


def counted(config: ModelConfig, activations: Activations = Activations.keep) -> tuple[float, float]:
    """Return the operations of a token by torch's count: matrix products, and attention.

    The scores that the backward pass of an attention kernel computes again are not counted. The operations run in
    float64, where the products of experts are plain ones, because torch's counter does not support grouped ones.
    """
    torch.manual_seed(0)
    model = Decoder(config, activations=activations).double()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.normal_(std=0.1)
    tokens = torch.randint(0, config.vocab_size, (2, config.sequence_length))
    with FlopCounterMode(display=False) as counter:
        model(tokens, targets=tokens, weights=torch.ones_like(tokens, dtype=torch.float64)).backward()
    by_operation = counter.get_flop_counts()["Global"]
    attention = {
        operation: count
        for operation, count in by_operation.items()
        if "attention" in str(operation) or "bmm" in str(operation)
    }
    # torch counts five products in the backward pass, the first of which recomputes the scores.
    needed = sum(count * 4 / 5 if "backward" in str(operation) else count for operation, count in attention.items())
    return (sum(by_operation.values()) - sum(attention.values())) / tokens.numel(), needed / tokens.numel()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_operations_agree_with_torch_s_counter(model: dict[str, object]) -> None:
    config = ModelConfig.model_validate({**SMALL, **model})
    products, attention = counted(config)
    assert token_flops(config, full_attention=True) == pytest.approx(products + attention, rel=1e-9)
    assert token_flops(config) == pytest.approx(products + attention / 2, rel=1e-9)


@pytest.mark.parametrize("activations", [Activations.products, Activations.recompute])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_repeated_operations_agree_with_torch_s_counter(model: dict[str, object], activations: Activations) -> None:
    config = ModelConfig.model_validate({**SMALL, **model})
    (products, attention), (plain_products, plain_attention) = counted(config, activations), counted(config)
    repeated = products - plain_products
    # On a CPU, attention with a soft cap consists of batched products, which KeepProducts repeats.
    if activations is Activations.recompute or "attentionSoftCap" not in model:
        repeated += attention - plain_attention
    assert recomputed_flops(config, activations, full_attention=True) == pytest.approx(repeated, rel=1e-9)
    hidden = 2.0 * config.layers * config.query_dim * config.sequence_length * (activations is Activations.recompute)
    assert recomputed_flops(config, activations) == pytest.approx(repeated - hidden, rel=1e-9)


def test_a_window_hides_what_is_beyond_it() -> None:
    plain = ModelConfig.model_validate({**SMALL, "headDim": 32})
    windowed = ModelConfig.model_validate({**SMALL, "headDim": 32, "window": {"size": 8, "fullEvery": 3}})
    pairs = sum(min(token, 8) for token in torch.arange(0.5, 32).tolist())
    hidden = 2 * 12 * 4 * 32 * (32 / 2 - (8 - 8 * 8 / (2 * 32)))
    assert token_flops(plain) - token_flops(windowed) == pytest.approx(hidden, rel=1e-9)
    assert pairs / 32 == pytest.approx(8 - 8 * 8 / (2 * 32), rel=1e-9)
    assert token_flops(plain, full_attention=True) == token_flops(windowed, full_attention=True)


def test_the_look_up_of_an_embedding_counts_nothing() -> None:
    tied = ModelConfig.model_validate(SMALL)
    assert token_flops(tied) == token_flops(tied.model_copy(update={"tie_embeddings": False}))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H100 of another kind", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_peak_is_of_exactly_this_device(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0)) == peak


def test_a_processor_has_no_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None
    assert all(peak > 0 for peak in PEAK_FLOPS.values())
