"""Published models: the decoder takes their config.json, and has as many parameters as their cards say."""

import re

import pytest
from pydantic import ValidationError

from concertina_trainer.format import hf_config

LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip

MIXED = ["sliding_attention", "full_attention"] * 16


def sizes(layers, dim, heads, kv_heads, hidden, vocabulary, tied=False, **fields):
    return {
        "num_hidden_layers": layers, "hidden_size": dim, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": hidden, "vocab_size": vocabulary, "tie_word_embeddings": tied, **fields,
    }  # fmt: skip


YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def gpt_oss(layers, experts):
    return sizes(
        layers, 2880, 64, 8, 2880, 201088, model_type="gpt_oss", head_dim=64, num_local_experts=experts,
        num_experts_per_tok=4, experts_per_token=4, swiglu_limit=7.0, sliding_window=128, rope_theta=150000,
        rope_scaling=YARN, initial_context_length=4096, attention_bias=True, rms_norm_eps=1e-5, hidden_act="silu",
        router_aux_loss_coef=0.9, layer_types=["sliding_attention", "full_attention"] * (layers // 2),
    )  # fmt: skip


def glm(layers, dim, hidden, **fields):
    return sizes(
        layers, dim, 96, 8, hidden, 151552, model_type="glm4_moe", head_dim=128, attention_bias=True,
        partial_rotary_factor=0.5, rms_norm_eps=1e-5, rope_theta=1000000, num_experts_per_tok=8, n_shared_experts=1,
        norm_topk_prob=True, n_group=1, topk_group=1, num_nextn_predict_layers=1, **fields,
    )  # fmt: skip


PUBLISHED = {
    "Llama 3.1 8B": (
        8_030_261_248,
        sizes(32, 4096, 32, 8, 14336, 128256, model_type="llama", rope_theta=500000.0, rope_scaling=LLAMA3),
    ),
    "Llama 3.2 1B": (
        1_235_814_400,
        sizes(16, 2048, 32, 8, 8192, 128256, True, model_type="llama", head_dim=64, rope_theta=500000.0,
              rope_scaling={**LLAMA3, "factor": 32.0}),
    ),
    "SmolLM2 135M": (134_515_008, sizes(30, 576, 9, 3, 1536, 49152, True, model_type="llama", rope_theta=100000)),
    "Mistral 7B v0.1": (7_241_732_096, sizes(32, 4096, 32, 8, 14336, 32000, model_type="mistral", sliding_window=4096)),
    "Mistral Nemo": (
        12_247_782_400, sizes(40, 5120, 32, 8, 14336, 131072, model_type="mistral", head_dim=128, sliding_window=None),
    ),
    "Mixtral 8x7B": (
        46_702_792_704,
        sizes(32, 4096, 32, 8, 14336, 32000, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2,
              sliding_window=None, rope_theta=1e6),
    ),
    "Qwen2.5 7B": (
        7_615_616_512,
        sizes(28, 3584, 28, 4, 18944, 152064, model_type="qwen2", use_sliding_window=False, sliding_window=131072,
              max_window_layers=28, rope_theta=1e6),
    ),
    "Qwen3 8B": (
        8_190_735_360,
        sizes(36, 4096, 32, 8, 12288, 151936, model_type="qwen3", head_dim=128, use_sliding_window=False,
              sliding_window=None, rope_scaling=None, rope_theta=1000000),
    ),
    "Qwen3 30B A3B": (
        30_532_122_624,
        sizes(48, 2048, 32, 4, 6144, 151936, model_type="qwen3_moe", head_dim=128, num_experts=128, norm_topk_prob=True,
              num_experts_per_tok=8, moe_intermediate_size=768, mlp_only_layers=[], decoder_sparse_step=1),
    ),
    "Qwen2 57B A14B": (
        57_408_658_944,
        sizes(28, 3584, 28, 4, 18944, 151936, model_type="qwen2_moe", num_experts=64, num_experts_per_tok=8,
              moe_intermediate_size=2560, shared_expert_intermediate_size=20480, norm_topk_prob=False,
              decoder_sparse_step=1, use_sliding_window=False, sliding_window=65536, max_window_layers=28,
              rope_theta=1000000.0),
    ),
    "Qwen1.5 MoE A2.7B": (
        14_315_784_192,
        sizes(24, 2048, 16, 16, 5632, 151936, model_type="qwen2_moe", num_experts=60, num_experts_per_tok=4,
              moe_intermediate_size=1408, shared_expert_intermediate_size=5632, norm_topk_prob=False,
              decoder_sparse_step=1, use_sliding_window=False, sliding_window=32768, max_window_layers=21,
              rope_theta=1000000.0),
    ),
    "Phi 3 mini 4k": (
        3_821_079_552,
        sizes(32, 3072, 32, 32, 8192, 32064, model_type="phi3", sliding_window=2047, rope_scaling=None),
    ),
    "Gemma 2 9B": (
        9_241_705_984,
        {name: value for name, value in sizes(
            42, 3584, 16, 8, 14336, 256000, model_type="gemma2", head_dim=256, hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=4096,
        ).items() if name != "tie_word_embeddings"},
    ),
    "Gemma 3 1B": (
        999_885_952,
        {name: value for name, value in sizes(
            26, 1152, 4, 1, 6912, 262144, model_type="gemma3_text", head_dim=256, query_pre_attn_scalar=256,
            hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=None, final_logit_softcapping=None,
            sliding_window=512, sliding_window_pattern=6, rope_local_base_freq=10000, rope_theta=1000000,
            rope_scaling=None,
        ).items() if name != "tie_word_embeddings"},
    ),
    "gpt-oss 20b": (20_914_757_184, gpt_oss(24, 32)),
    "gpt-oss 120b": (116_829_156_672, gpt_oss(36, 128)),
    "GLM 4.5": (
        352_797_814_784,
        glm(92, 5120, 12288, moe_intermediate_size=1536, n_routed_experts=160, first_k_dense_replace=3,
            use_qk_norm=True, routed_scaling_factor=2.5),
    ),
    "GLM 4.5 Air": (
        106_852_245_504,
        glm(46, 4096, 10944, moe_intermediate_size=1408, n_routed_experts=128, first_k_dense_replace=1,
            use_qk_norm=False, routed_scaling_factor=1.0),
    ),
    "GLM 4 9B 0414": (
        9_400_279_040,
        sizes(40, 4096, 32, 2, 13696, 151552, model_type="glm4", head_dim=128, attention_bias=True,
              partial_rotary_factor=0.5, rms_norm_eps=1e-5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_number_of_parameters(name):
    parameters, config = PUBLISHED[name]
    found = hf_config.described(config)
    assert found.problems == []
    model = found.model()
    assert model.weights == parameters
    assert hf_config.described(hf_config.config_json(model)).model() == model


def test_windows_are_those_of_each_layer():
    gemma = hf_config.described(PUBLISHED["Gemma 3 1B"][1]).model()
    windowed = [layer for layer in range(gemma.layers) if gemma.window_of(layer) is not None]
    assert windowed == [layer for layer in range(26) if (layer + 1) % 6]
    mistral = hf_config.described(PUBLISHED["Mistral 7B v0.1"][1]).model()
    assert all(mistral.window_of(layer) for layer in range(mistral.layers))


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        (
            "Qwen2.5 7B",
            {"use_sliding_window": True},
            "use_sliding_window is true, and the bundled decoder supports only false",
        ),
        (
            "Qwen3 30B A3B",
            {"mlp_only_layers": [0]},
            r"mlp_only_layers is \[0\], and the bundled decoder supports only \[\]",
        ),
        (
            "Qwen2 57B A14B",
            {"decoder_sparse_step": 2},
            "decoder_sparse_step is 2, and the bundled decoder supports onl",
        ),
        (
            "Qwen2 57B A14B",
            {"shared_expert_intermediate_size": 20000},
            "shared_expert_intermediate_size is 20000, and the bundled decoder supports a multiple of the width of an "
            "expert, which is 2560",
        ),
        ("Qwen2 57B A14B", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0, and the bun"),
        ("Phi 3 mini 4k", {"rope_scaling": {"type": "longrope"}}, 'rope_type is "longrope", and the bundled decoder'),
        (
            "Phi 3 mini 4k",
            {"rope_scaling": {"type": "yarn"}},
            'rope_type is "yarn", and the bundled decoder supports only "def',
        ),
        (
            "Llama 3.1 8B",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5, and the bundled decoder supports only 1",
        ),
        ("Llama 3.1 8B", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor of the rope_type"),
        ("Gemma 2 9B", {"layer_types": ["full_attention"] * 42}, "layer_types is "),
        (
            "Gemma 2 9B",
            {"sliding_window_pattern": 6},
            "sliding_window_pattern is 6, and this model family has no such field",
        ),
        (
            "Gemma 3 1B",
            {"sliding_window_pattern": 1},
            "sliding_window_pattern is 1, and in this model family the bundled decoder supports only full",
        ),
        ("Gemma 3 1B", {"layer_types": ["full_attention"] * 3}, "layer_types is "),
        (
            "Mistral 7B v0.1",
            {"layer_types": MIXED},
            r"layer_types is .*, and in this model family the bundled decoder supports only a window in",
        ),
        (
            "Mistral 7B v0.1",
            {"sliding_window_pattern": 2},
            "sliding_window_pattern is 2, and this model family has no such",
        ),
        ("Llama 3.1 8B", {"rope_parameters": {**LLAMA3, "factor": 4.0}}, "rope_scaling and rope_parameters differ"),
        ("Llama 3.1 8B", {"original_max_position_embeddings": 4096}, "original_max_position_embeddings is 4096 at the"),
        ("Gemma 3 1B", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters has neither"),
        (
            "Llama 3.1 8B",
            {"attention_dropout": 0.1},
            "attention_dropout is 0.1, and the bundled decoder supports no drop",
        ),
        ("Phi 3 mini 4k", {"resid_pdrop": 0.1}, "resid_pdrop is 0.1, and the bundled decoder supports no dropout"),
        ("Gemma 3 1B", {"sliding_window": None}, "sliding_window is null, and the bundled decoder needs a number"),
        (
            "Gemma 2 9B",
            {"hidden_activation": "gelu"},
            'hidden_activation is "gelu", and the bundled decoder supports only "gelu',
        ),
        ("gpt-oss 20b", {"quantization_config": {"quant_method": "mxfp4"}}, r"quantization_config is .*: dequantize"),
        ("gpt-oss 20b", {"rope_scaling": None}, 'rope_type is "default", and the bundled decoder supports only "yarn"'),
        ("gpt-oss 20b", {"attention_bias": False}, "attention_bias is false, and the bundled decoder supports only tr"),
        ("gpt-oss 20b", {"sliding_window": None}, "sliding_window is null, and the bundled decoder needs a number"),
        ("GLM 4.5", {"n_group": 8}, "n_group is 8, and the bundled decoder supports only 1"),
        ("GLM 4 9B 0414", {"model_type": "deepseek_v3"}, 'model_type is "deepseek_v3", and the bundled decoder supp'),
    ],
)
def test_what_is_not_computed_is_refused_by_its_field(name, changed, says):
    problems = hf_config.described({**PUBLISHED[name][1], **changed}).problems
    assert any(re.match(says, problem) for problem in problems), problems


def test_a_huge_number_of_layers_is_refused_at_once():
    """Make no list of the layers before their number is checked."""
    config = {**PUBLISHED["Gemma 3 1B"][1], "num_hidden_layers": 10**12}
    with pytest.raises(ValidationError, match=r"layers\n"):
        hf_config.described(config).model()


def test_null_key_and_value_heads_are_as_many_as_heads():
    config = PUBLISHED["Mistral 7B v0.1"][1]
    assert hf_config.described({**config, "num_key_value_heads": None}).fields["kvHeads"] == 32
    absent = {name: value for name, value in PUBLISHED["Qwen2.5 7B"][1].items() if name != "num_key_value_heads"}
    assert hf_config.described(absent).fields["kvHeads"] == 32
    assert hf_config.described({**absent, "num_key_value_heads": None}).fields["kvHeads"] == 28


def test_the_length_of_yarn_is_exported():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    model = hf_config.described({**PUBLISHED["Qwen2.5 7B"][1], "rope_scaling": yarn}).model()
    assert hf_config.config_json(model)["max_position_embeddings"] == 131072


def test_linear_positions_have_no_attention_factor():
    linear = {"rope_type": "linear", "factor": 2.0, "attention_factor": 1.0}
    assert not hf_config.described({**PUBLISHED["Qwen2.5 7B"][1], "rope_scaling": linear}).problems
