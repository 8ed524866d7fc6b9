"""Families of Hugging Face models that the bundled decoder can compute, keyed by `model_type`.

A family maps fields of config.json to fields of spec.trainer.model, and the names of this project's weights to those of
Hugging Face. Every family has the fields COMMON and the names NAMES, except where the family's own entries replace
them. Sources: configuration_*.py and modeling_*.py of transformers 5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import field

EXPERT = "{expert}"
"""Placeholder for the number of an expert in the name of a tensor."""
COMMON = {
    "num_hidden_layers": "layers",
    "hidden_size": "dim",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kvHeads",
    "head_dim": "headDim",
    "intermediate_size": "hiddenDim",
    "vocab_size": "vocabSize",
    "tie_word_embeddings": "tieEmbeddings",
    "rms_norm_eps": "normEpsilon",
}
"""Fields of spec.trainer.model, keyed by the field of config.json with the same value."""
DEFAULTS: Mapping[str, object] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_type": "default",
    "partial_rotary_factor": 1.0,
}
"""Default values of transformers for fields that are absent in config.json."""
PLAIN: Mapping[str, object] = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
NULLABLE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
"""Fields of config.json in which null has a meaning of its own. In other fields, null counts as absent."""
NO_WINDOW = {"use_sliding_window": False}
EXPERTS_EVERYWHERE: Mapping[str, object] = {"decoder_sparse_step": 1, "mlp_only_layers": []}
"""Fields of config.json of Qwen's models, with their values if every layer has experts."""
ENDS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
"""Hugging Face names of the weights outside of layers, keyed by the name in this project."""
NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.gate.weight": "mlp.gate_proj.weight",
    "feed_forward.up.weight": "mlp.up_proj.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}
"""Hugging Face names of the weights within a layer, keyed by the name in this project."""
QKV_BIAS = {
    "attention.query.bias": "self_attn.q_proj.bias",
    "attention.key.bias": "self_attn.k_proj.bias",
    "attention.value.bias": "self_attn.v_proj.bias",
}
QK_NORM = {
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
}
MLP_EXPERTS = {
    "feed_forward.router.weight": "mlp.gate.weight",
    "feed_forward.experts.gate": f"mlp.experts.{EXPERT}.gate_proj.weight",
    "feed_forward.experts.up": f"mlp.experts.{EXPERT}.up_proj.weight",
    "feed_forward.experts.down": f"mlp.experts.{EXPERT}.down_proj.weight",
}
FUSED_GATE_UP = {"mlp.gate_up_proj.weight": ("feed_forward.gate.weight", "feed_forward.up.weight")}
GEMMA_ONLY: Mapping[str, object] = {
    "hidden_activation": "gelu_pytorch_tanh", "partial_rotary_factor": 1.0, "attention_bias": False,
    "use_bidirectional_attention": False,
}  # fmt: skip
GEMMA_FIELDS = {
    "query_pre_attn_scalar": "queryScale",
    "attn_logit_softcapping": "attentionSoftCap",
    "final_logit_softcapping": "logitSoftCap",
}
GEMMA_DEFAULTS: Mapping[str, object] = {
    **GEMMA_ONLY, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}  # fmt: skip
GEMMA_FIXED = {"activation": "GeluTanh", "embeddingScale": True, "normOffset": True, "postNorms": True}
GEMMA_NORMS = {
    "attention_post_norm.weight": "post_attention_layernorm.weight",
    "feed_forward_norm.weight": "pre_feedforward_layernorm.weight",
    "feed_forward_post_norm.weight": "post_feedforward_layernorm.weight",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """Hugging Face models of one `model_type`."""

    architecture: str
    """Name of the model's class in transformers."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields of spec.trainer.model, keyed by field of config.json. They extend COMMON or replace entries of COMMON."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of absent fields that differ from DEFAULTS in this family."""
    only: Mapping[str, object] = field(default_factory=dict)
    """Fields of config.json for which the decoder supports only one value, with that value."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Values, the same in all models of the family, of fields of spec.trainer.model that config.json lacks."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Hugging Face names within a layer, keyed by this project's name.

    They extend NAMES or replace entries of NAMES.
    """
    fused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Hugging Face tensors within a layer that consist of the rows of several weights one after another, keyed by name.

    Each value lists this project's names of these weights, in the order of the rows.
    """
    shared_width: str | None = None
    """Name of the config.json field with the combined width of the shared experts.

    The width must be a multiple of the width of one expert.
    """
    prediction_layers: str | None = None
    """Name of the config.json field with the number of layers after the last one that predict further tokens.

    The decoder has no such layers. If a file contains these layers, they are not loaded, as in transformers.
    """
    windows: bool = False
    """True if the field sliding_window gives layers an attention window. Otherwise the field is ignored."""
    needs_window: bool = False
    """True if transformers needs a number in sliding_window."""
    full_every: int | None = None
    """Distance between layers without a window if no field of config.json gives it. None: all layers have a window."""
    window_pattern: bool = False
    """True if the field sliding_window_pattern of config.json gives the distance between layers without a window."""
    whole_heads: bool = False
    """True if transformers requires that hidden_size is a multiple of num_attention_heads."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Usual names of fields in config.json, keyed by the alternative name that some versions of transformers write."""


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        defaults={"attention_bias": False, "mlp_bias": False},
        only={**PLAIN, "attention_bias": False, "mlp_bias": False},
        whole_heads=True,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        only=PLAIN,
        windows=True,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        defaults={"num_key_value_heads": 32, **NO_WINDOW},
        only={**PLAIN, **NO_WINDOW},
        fixed={"qkvBias": True},
        names=QKV_BIAS,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        defaults={"num_key_value_heads": 32, "head_dim": 128, **NO_WINDOW, "attention_bias": False},
        only={**PLAIN, **NO_WINDOW, "attention_bias": False},
        fixed={"qkNorm": True},
        names=QK_NORM,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        fields={
            "intermediate_size": "experts.hiddenDim",
            "num_local_experts": "experts.count",
            "num_experts_per_tok": "experts.activePerToken",
            "router_aux_loss_coef": "experts.balanceLoss",
        },
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0,
        },
        only={**PLAIN, "router_jitter_noise": 0.0},
        windows=True,
        names={
            "feed_forward.router.weight": "block_sparse_moe.gate.weight",
            "feed_forward.experts.gate": f"block_sparse_moe.experts.{EXPERT}.w1.weight",
            "feed_forward.experts.up": f"block_sparse_moe.experts.{EXPERT}.w3.weight",
            "feed_forward.experts.down": f"block_sparse_moe.experts.{EXPERT}.w2.weight",
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        fields={
            "moe_intermediate_size": "experts.hiddenDim",
            "num_experts": "experts.count",
            "num_experts_per_tok": "experts.activePerToken",
            "norm_topk_prob": "experts.normalizeShares",
            "router_aux_loss_coef": "experts.balanceLoss",
        },
        defaults={
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
            **NO_WINDOW,
            "attention_bias": False,
            **EXPERTS_EVERYWHERE,
        },
        only={**PLAIN, **NO_WINDOW, "attention_bias": False, **EXPERTS_EVERYWHERE},
        fixed={"qkNorm": True},
        names={**QK_NORM, **MLP_EXPERTS},
        other_names={"num_local_experts": "num_experts"},
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        fields={
            "qkv_bias": "qkvBias",
            "moe_intermediate_size": "experts.hiddenDim",
            "num_experts": "experts.count",
            "num_experts_per_tok": "experts.activePerToken",
            "norm_topk_prob": "experts.normalizeShares",
            "router_aux_loss_coef": "experts.balanceLoss",
        },
        defaults={
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
            **NO_WINDOW,
            **EXPERTS_EVERYWHERE,
        },
        only={**PLAIN, **NO_WINDOW, **EXPERTS_EVERYWHERE},
        fixed={"experts.sharedGate": True},
        names={
            **QKV_BIAS,
            **MLP_EXPERTS,
            "feed_forward.shared.gate.weight": "mlp.shared_expert.gate_proj.weight",
            "feed_forward.shared.up.weight": "mlp.shared_expert.up_proj.weight",
            "feed_forward.shared.down.weight": "mlp.shared_expert.down_proj.weight",
            "feed_forward.shared_gate": "mlp.shared_expert_gate.weight",
        },
        shared_width="shared_expert_intermediate_size",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": None},
        only={"hidden_act": "silu", "rope_type": "default"},
        fused={
            "self_attn.qkv_proj.weight": (
                "attention.query.weight",
                "attention.key.weight",
                "attention.value.weight",
            ),
            **FUSED_GATE_UP,
        },
        windows=True,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        fields=GEMMA_FIELDS,
        defaults={**GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        only=GEMMA_ONLY,
        fixed=GEMMA_FIXED,
        names=GEMMA_NORMS,
        windows=True,
        full_every=2,
        whole_heads=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        fields={**GEMMA_FIELDS, "rope_local_base_freq": "window.ropeTheta"},
        defaults={
            **GEMMA_DEFAULTS,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        only=GEMMA_ONLY,
        fixed={**GEMMA_FIXED, "qkNorm": True},
        names={**GEMMA_NORMS, **QK_NORM},
        windows=True,
        full_every=6,
        needs_window=True,
        window_pattern=True,
        whole_heads=True,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        fields={
            "intermediate_size": "experts.hiddenDim",
            "num_local_experts": "experts.count",
            "num_experts_per_tok": "experts.activePerToken",
            "swiglu_limit": "experts.clampedSwiglu.limit",
            "swiglu_alpha": "experts.clampedSwiglu.alpha",
        },
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
            "attention_bias": True,
        },
        # Without fields of positions, transformers assumes its own parameters of YaRN.
        only={**PLAIN, "attention_bias": True, "rope_type": "yarn"},
        fixed={"qkvBias": True, "outputBias": True, "attentionSinks": True, "experts.balanceLoss": 0.0},
        names={
            **QKV_BIAS,
            "attention.output.bias": "self_attn.o_proj.bias",
            "attention.sinks": "self_attn.sinks",
            "feed_forward.router.weight": "mlp.router.weight",
            "feed_forward.router.logit_bias": "mlp.router.bias",
            "feed_forward.experts.gate_up": "mlp.experts.gate_up_proj",
            "feed_forward.experts.gate_up_bias": "mlp.experts.gate_up_proj_bias",
            "feed_forward.experts.down": "mlp.experts.down_proj",
            "feed_forward.experts.down_bias": "mlp.experts.down_proj_bias",
        },
        windows=True,
        needs_window=True,
        full_every=2,
        other_names={"num_experts": "num_local_experts"},
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        fields={"attention_bias": "qkvBias"},
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-7,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        only={"hidden_act": "silu"},
        fixed={"postNorms": True, "rotaryPairs": "Adjacent"},
        names={
            **QKV_BIAS,
            "attention_post_norm.weight": "post_self_attn_layernorm.weight",
            "feed_forward_post_norm.weight": "post_mlp_layernorm.weight",
        },
        fused=FUSED_GATE_UP,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        fields={
            "attention_bias": "qkvBias",
            "use_qk_norm": "qkNorm",
            "moe_intermediate_size": "experts.hiddenDim",
            "n_routed_experts": "experts.count",
            "num_experts_per_tok": "experts.activePerToken",
            "n_shared_experts": "experts.shared",
            "first_k_dense_replace": "experts.firstDense",
            "norm_topk_prob": "experts.normalizeShares",
            "routed_scaling_factor": "experts.shareScale",
        },
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "use_qk_norm": False,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.5,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
        only={"hidden_act": "silu", "n_group": 1, "topk_group": 1},
        prediction_layers="num_nextn_predict_layers",
        fixed={"experts.scores": "Sigmoid", "experts.biasRate": 0.0, "experts.balanceLoss": 0.0},
        names={
            **QKV_BIAS,
            **QK_NORM,
            **MLP_EXPERTS,
            "feed_forward.router.bias": "mlp.gate.e_score_correction_bias",
            "feed_forward.shared.gate.weight": "mlp.shared_experts.gate_proj.weight",
            "feed_forward.shared.up.weight": "mlp.shared_experts.up_proj.weight",
            "feed_forward.shared.down.weight": "mlp.shared_experts.down_proj.weight",
        },
        other_names={"num_local_experts": "n_routed_experts"},
    ),
}
"""Families, keyed by `model_type`.

A model is exported as the first family in this order that has the model's arithmetic.
"""
