"""Layers of experts in the names of the Hugging Face models that compute alike, and their config.json. No torch.

Those models hold each expert's matrices by themselves. This project holds those of all experts in one tensor.

Mixtral: softmax, neither shared experts nor biases, in each layer. GLM 4 MoE: sigmoid, shared experts and biases, first
layers dense; its norms of queries and keys are off, and positions rotate whole heads.
"""

from __future__ import annotations

import enum
import re

from concertina_state.errors import InvalidInput
from concertina_trainer.config.model_config import ExpertsConfig, ModelConfig, RouterScores


class ExpertFamily(enum.Enum):
    MIXTRAL = "mixtral"
    GLM4_MOE = "glm4_moe"


EXPERT = "{expert}"
"""Placeholder for the number of the expert in a name."""
NAMES = {
    ExpertFamily.MIXTRAL: {
        "router.weight": "block_sparse_moe.gate.weight",
        "experts.gate": f"block_sparse_moe.experts.{EXPERT}.w1.weight",
        "experts.up": f"block_sparse_moe.experts.{EXPERT}.w3.weight",
        "experts.down": f"block_sparse_moe.experts.{EXPERT}.w2.weight",
    },
    ExpertFamily.GLM4_MOE: {
        "router.weight": "mlp.gate.weight",
        "router.bias": "mlp.gate.e_score_correction_bias",
        "experts.gate": f"mlp.experts.{EXPERT}.gate_proj.weight",
        "experts.up": f"mlp.experts.{EXPERT}.up_proj.weight",
        "experts.down": f"mlp.experts.{EXPERT}.down_proj.weight",
        "shared.gate.weight": "mlp.shared_experts.gate_proj.weight",
        "shared.up.weight": "mlp.shared_experts.up_proj.weight",
        "shared.down.weight": "mlp.shared_experts.down_proj.weight",
    },
}
"""Names within feed_forward, and the corresponding names within a layer of the Hugging Face model."""


def family(experts: ExpertsConfig) -> ExpertFamily:
    """Return the family of Hugging Face models that computes as this mixture of experts does.

    Raises:
        InvalidInput: When there is none.
    """
    biased, sigmoid = experts.bias_rate is not None, experts.scores is RouterScores.sigmoid
    if not sigmoid and not biased and not experts.shared and not experts.first_dense:
        return ExpertFamily.MIXTRAL
    if sigmoid and biased and experts.shared:
        return ExpertFamily.GLM4_MOE
    raise InvalidInput(
        "no Hugging Face model computes as this mixture of experts does, so it can't be exported. Those that do are "
        "Mixtral (model.experts with scores softmax, no shared, no firstDense, no biasRate) and GLM 4 MoE (scores "
        "sigmoid, shared, biasRate)."
    )


def theirs(name: str, experts: ExpertsConfig) -> str | None:
    """Return the Hugging Face name of a weight, with EXPERT if there is a tensor for each.

    None if there is no such weight.

    Raises:
        InvalidInput: When no Hugging Face model computes as this one does.
    """
    match = re.fullmatch(r"blocks\.(\d+)\.feed_forward\.(.+)", name)
    inner = NAMES[family(experts)].get(match[2]) if match else None
    return None if match is None or inner is None else f"model.layers.{match[1]}.{inner}"


def config_fields(model: ModelConfig, experts: ExpertsConfig) -> dict[str, object]:
    """Return the fields of config.json in which the model differs from a Llama.

    Raises:
        InvalidInput: When no Hugging Face model computes as this one does.
    """
    common: dict[str, object] = {"num_experts_per_tok": experts.active_per_token, "output_router_logits": False}
    if family(experts) is ExpertFamily.MIXTRAL:
        return common | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "intermediate_size": model.expert_dim,
            "num_local_experts": experts.count,
            "router_aux_loss_coef": experts.balance_loss,
            "router_jitter_noise": 0.0,
            "sliding_window": None,
        }
    return common | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "first_k_dense_replace": experts.first_dense,
        "moe_intermediate_size": model.expert_dim,
        "n_group": 1,
        "n_routed_experts": experts.count,
        "n_shared_experts": experts.shared,
        "norm_topk_prob": True,
        "partial_rotary_factor": 1.0,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
    }
