"""Parts of a model of transformers on each rank of a tensor group, and plans that are refused.

On a fake process group, which lets one process be any rank.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup  # noqa: F401  # registers the backend
from transformers import AutoConfig

from builders.train import families
from concertina_state.errors import InvalidInput
from concertina_trainer.model import hf
from concertina_trainer.model.spec import DataShape
from concertina_trainer.parallel.hf_tensor import DividedModel

SIZES = {**families.SIZES, "pad_token_id": 0}


def built(kind, **changed):
    with torch.device("meta"):
        options = {**AutoConfig.for_model(kind, **changed).to_dict(), **changed, "model_type": kind}
        return hf.build(options, DataShape(24, 100))


@contextlib.contextmanager
def tensor_group(rank, size):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=(f"rank {rank} of {size}",))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_its_part_and_tied_weights_stay_tied(rank):
    model = built("gemma2", **SIZES, head_dim=16)
    whole = {name: parameter.shape for name, parameter in model.named_parameters()}
    with tensor_group(rank, 2) as mesh:
        DividedModel(model, mesh)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    weights = dict(model.named_parameters())
    assert {name: weight.shape for name, weight in weights.items()} == whole
    parts = {
        "model.embed_tokens.weight": (Shard(0), (64, 32)),
        "model.layers.2.self_attn.q_proj.weight": (Shard(0), (32, 32)),
        "model.layers.2.self_attn.k_proj.weight": (Shard(0), (16, 32)),
        "model.layers.2.self_attn.o_proj.weight": (Shard(1), (32, 32)),
        "model.layers.2.mlp.down_proj.weight": (Shard(1), (32, 24)),
        "model.layers.2.input_layernorm.weight": (Replicate(), (32,)),
    }
    for name, (placement, shape) in parts.items():
        assert weights[name].placements == (placement,), name
        assert weights[name].to_local().shape == shape, name


@pytest.mark.parametrize(
    ("kind", "size", "changed", "says"),
    [
        ("gpt2", 2, {"n_embd": 32, "n_layer": 2, "n_head": 4}, "no plan for the .* of the layers of GPT2LMHeadModel"),
        (
            "qwen3_moe", 2, {**SIZES, **families.EXPERTS, "head_dim": 16},
            r"Qwen3MoeForCausalLM has the style moe_tp_experts for model\.layers\.0\.mlp\.experts, which",
        ),
        (
            "phi3", 2, {**SIZES, "base_model_tp_plan": {"layers.*.mlp.gate_up_proj": "packed_colwise"}},
            r"has the style packed_colwise for model\.layers\.0\.mlp\.gate_up_proj, which .* for a Linear",
        ),
        ("gpt_oss", 2, {**SIZES, **families.GPT_OSS}, "no plan for the .* of the layers of GptOssForCausalLM"),
        ("llama", 4, SIZES, r"tensor is 4, and must divide the 2 heads of model\.layers\.0\.self_attn\.k_proj"),
        ("llama", 2, {**SIZES, "vocab_size": 129}, r"must divide the 129 columns of model\.embed_tokens\.weight"),
        ("llama", 2, {**SIZES, "intermediate_size": 33}, r"the 33 columns of model\.layers\.0\.mlp\.gate_proj\.weight"),
        (
            "gpt_neox", 2, {**SIZES, "tie_word_embeddings": True},
            r"GPTNeoXForCausalLM is the weight of two modules, which the plan of transformers divides in two ways",
        ),
    ],
)  # fmt: skip
def test_plans_that_the_trainer_can_t_follow_are_refused_by_name(kind, size, changed, says):
    model = built(kind, **changed)
    with tensor_group(0, size) as mesh, pytest.raises(InvalidInput, match=says):
        DividedModel(model, mesh)
