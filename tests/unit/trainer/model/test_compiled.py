"""Compiled blocks: one graph each, of the same numbers, and none for another batch.

torch's backend `eager` runs the graphs that torch has traced. They are what a compiler for a device would get.
"""

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention

from concertina_trainer.config.memory_config import Activations
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.trainer import Compile, TrainerConfig
from concertina_trainer.model import attention
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.dropout import keys_of_tokens
from concertina_trainer.model.float8 import use_float8
from concertina_trainer.parallel import compiled

LENGTH, ROWS = 32, 2
SMALL = {"layers": 3, "dim": 32, "heads": 4, "kvHeads": 2, "vocabSize": 64, "sequenceLength": LENGTH}
FAMILIES = {
    "dense": {},
    "LoRA": {"lora": {"rank": 2}},
    "dropout": {"lora": {"rank": 2, "dropout": 0.4}},
    "dropout and experts": {
        "lora": {"rank": 8, "dropout": 0.4},
        "experts": {"count": 4, "hiddenDim": 24, "shared": 1, "firstDense": 1, "biasRate": 0.0},
    },
    "windows": {"window": {"size": 5, "fullEvery": 2}, "qkNorm": True, "postNorms": True, "attentionSoftCap": 0.1},
    "sinks": {"attentionSinks": True, "outputBias": True, "experts": {"count": 4, "clampedSwiglu": {}}},
    "experts": {"experts": {"count": 4, "hiddenDim": 24, "shared": 1, "firstDense": 1, "biasRate": 0.01}},
    "Float8": {"hiddenDim": 48},
}

GRAPHS = {
    "dense": 1,
    "Float8": 1,
    "LoRA": 2,
    "dropout": 2,
    "dropout and experts": 2,
    "windows": 1,
    "sinks": 1,
    "experts": 2,
}
"""Number of graphs of each family.

With LoRA, the input of the first block has no gradient. The first block of the family with experts has none.
"""


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", {"backend": "eager"})
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def decoder(family, activations=Activations.keep):
    torch.manual_seed(1)
    model = Decoder(ModelConfig.model_validate({**SMALL, **FAMILIES[family]}), activations=activations)
    for value in (*model.parameters(), *model.buffers()):
        torch.nn.init.normal_(value, std=0.2)
    if family == "Float8":
        use_float8(model)
    return model


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (ROWS, LENGTH + 1), generator=generator)
    documents = torch.randint(2, (ROWS, LENGTH), generator=generator).cumsum(1)
    return tokens[:, :-1], documents, tokens[:, 1:], torch.rand(ROWS, LENGTH, generator=generator)


def step(model, seed, family):
    model.zero_grad()
    drops = FAMILIES[family].get("lora", {}).get("dropout")
    keys = keys_of_tokens([seed], 7, ROWS, LENGTH, torch.device("cpu")) if drops else None
    loss = model(*batch(seed), keys)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad} | {"loss": loss.detach()}


GATE = {
    "dense": (Activations.keep, Activations.products, Activations.recompute),
    "LoRA": (Activations.keep,),
    "dropout": (Activations.recompute,),
    "dropout and experts": (Activations.products,),
    "windows": (Activations.products,),
    "sinks": (Activations.keep,),
    "experts": (Activations.recompute,),
    "Float8": (Activations.products,),
}
"""What the gate keeps of activations, by family. Each family is in the gate, and each choice with several of them."""
SAME = "tests/unit/trainer/model/test_compiled.py::test_blocks_compute_the_same_in_one_graph_for_all_batches"


@pytest.mark.parametrize(
    ("family", "activations"),
    [
        pytest.param(
            family,
            activations,
            marks=[] if activations in GATE[family] else [pytest.mark.long(law=f"{SAME}[{family}-{GATE[family][0]}]")],
        )
        for family in FAMILIES
        for activations in (Activations.keep, Activations.products, Activations.recompute)
    ],
)
def test_blocks_compute_the_same_in_one_graph_for_all_batches(family, activations):
    """A break in a graph is an error, because blocks are compiled with fullgraph."""
    model = decoder(family, activations)
    expected = step(model, 2, family)
    compiled.compile_blocks(model)
    step(model, 1, family)
    graphs = compiled.graphs()
    assert graphs == GRAPHS[family], "the blocks share graphs"
    found = step(model, 2, family)
    assert compiled.graphs() == graphs, "another batch, with other documents"
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=lambda said, of=name: f"{of}: {said}")


def test_masks_of_gpus_need_no_other_graph(monkeypatch):
    """FlexAttention has no backward pass on CPU, so this is the forward pass alone."""
    model = decoder("windows")
    tokens = [batch(seed)[:2] for seed in (1, 2)]
    with torch.no_grad():
        expected = [model(*each) for each in tokens]
        monkeypatch.setattr(attention, "_pairs", attention._blocks)
        compiled.compile_blocks(model)
        found = [model(tokens[0][0], tokens[0][1])]
        graphs = compiled.graphs()
        found.append(model(tokens[1][0], tokens[1][1]))
    assert compiled.graphs() == graphs
    for value, same in zip(found, expected, strict=True):
        torch.testing.assert_close(value, same, rtol=1e-5, atol=1e-6)


KEPT = "tests/unit/trainer/model/test_compiled.py::test_attention_of_gpus_is_kept_with_the_products[KeepProducts-False]"


@pytest.mark.parametrize(
    ("activations", "again"),
    [(Activations.products, False), pytest.param(Activations.recompute, True, marks=pytest.mark.long(law=KEPT))],
)
def test_attention_of_gpus_is_kept_with_the_products(monkeypatch, activations, again):
    """FlexAttention refuses a backward pass on CPU. Without this check, torch traces it, as on a GPU."""
    calls = {"forward": 0, "backward": 0}

    def counting(part):
        def compiled_graph(graph, inputs):
            calls[part] += sum(node.target is torch.ops.higher_order.flex_attention for node in graph.graph.nodes)
            return make_boxed_func(graph.forward)

        return compiled_graph

    backend = aot_autograd(
        fw_compiler=counting("forward"), bw_compiler=counting("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip
    monkeypatch.setattr(compiled, "BACKEND", {"backend": backend})
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(attention, "_pairs", attention._blocks)
    model = decoder("windows", activations)
    compiled.compile_blocks(model)
    model(*batch(1)).backward()
    assert calls["forward"] > 0
    assert (calls["backward"] > 0) == again


@pytest.mark.parametrize(
    ("changed", "on_gpu"),
    [
        ({}, Compile.blocks),
        ({"compile": "Never"}, Compile.never),
        ({"determinism": "Bitwise"}, Compile.never),
        ({"model": {"entrypoint": "a.b:c"}}, Compile.never),
        ({"data": {"uri": "/a", "documents": "Bucketed"}}, Compile.never),
        ({"data": {"uri": "/a", "balance": "Speed"}}, Compile.never),
    ],
)
def test_blocks_are_compiled_on_gpus_where_they_can_be(changed, on_gpu):
    config = TrainerConfig.model_validate({"data": {"uri": "/a"}, **changed})
    assert compiled.choose(config, cuda=True) is on_gpu
    assert compiled.choose(config, cuda=False) is Compile.never
    asked = config.model_copy(update={"compile": Compile.blocks})
    assert compiled.choose(asked, cuda=False) is Compile.blocks
