"""Small random models of transformers, one for each family and switch that the bundled decoder computes."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GLM_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "head_dim": 16, "attention_bias": True,
}  # fmt: skip
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7}
GEMMA3 = {
    **GEMMA, "num_hidden_layers": 7, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
GPT_OSS = {
    "head_dim": 16, "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.7,
    "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False},
}  # fmt: skip
MODELS = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}}),
    "yarn": ("qwen2", {"rope_parameters": YARN}),
    "yarn, all fields": (
        "llama",
        {"rope_parameters": {**YARN, "beta_fast": 8.0, "beta_slow": 0.5, "attention_factor": 1.3, "truncate": False}},
    ),
    "smollm": ("llama", {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 7}),
    "mistral nemo": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "heads that do not divide the width": ("qwen3", {"hidden_size": 40, "num_attention_heads": 6, "head_dim": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 7, "pad_token_id": 0}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2, no caps": ("gemma2", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", GEMMA3),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss, other limits": ("gpt_oss", {**GPT_OSS, "swiglu_limit": 0.4, "swiglu_alpha": 2.0, "num_hidden_layers": 4}),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": True, "pad_token_id": 0}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral, window": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe, shares as they are": ("qwen3_moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": False}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen2_moe, normalized shares": (
        "qwen2_moe",
        {**EXPERTS, "shared_expert_intermediate_size": 24, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "glm4_moe": ("glm4_moe", {**GLM_EXPERTS, "use_qk_norm": True, "routed_scaling_factor": 2.5}),
    "glm4_moe, shares as they are": ("glm4_moe", {**GLM_EXPERTS, "norm_topk_prob": False}),
}  # fmt: skip
"""By name: `model_type`, and fields of its config.json beside SIZES."""

MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "pad_token_id": 0}
OF_TRANSFORMERS = {
    "olmoe": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    "qwen2_moe": {**SIZES, **MIXTURE, "num_experts": 4, "shared_expert_intermediate_size": 40},
    "deepseek_v3": {
        **SIZES, **MIXTURE, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}  # fmt: skip
"""Models whose published files have one tensor for each expert, and that only `model.hf` trains, by `model_type`."""


def made(name, **changed):
    """Return the model with random weights. Norms are not 1, and biases not 0, so that each of them matters."""
    kind, fields = MODELS[name]
    config = AutoConfig.for_model(kind, **{**SIZES, **fields, **changed})
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in (*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("correction_bias"))):
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(0.3 * noise) if weight.dim() < 2 else weight.copy_(noise / weight.shape[-1] ** 0.5)
    return model


def exported_as(name):
    """Return the first family that computes alike: a Mistral without a window is a Llama."""
    kind, fields = MODELS[name]
    return "llama" if kind == "mistral" and fields["sliding_window"] is None else kind
