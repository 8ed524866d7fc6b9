"""Layers of experts in the names of the Hugging Face models that compute as ours do; config.json of these. No torch.

Theirs hold each expert's matrices by themselves, ours all experts' in one tensor.
Mixtral: softmax, neither shared experts nor biases, in each layer. GLM 4 MoE: sigmoid, shared experts and biases, first
layers dense; its norms of queries and keys are off, and positions rotate whole heads."""

from __future__ import annotations

import enum
import re

from concertina_state.errors import InvalidInput
from concertina_trainer.config.model_config import ExpertsConfig, ModelConfig, RouterScores


class ExpertFamily(enum.Enum):
    MIXTRAL = "mixtral"
    GLM4_MOE = "glm4_moe"


EXPERT = "{expert}"
"""Where the number of the expert stands in a name."""
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
"""Ours within feed_forward, and theirs within a layer."""


def family(experts: ExpertsConfig) -> ExpertFamily:
    """Raises InvalidInput where none computes as this one does."""
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
    """Of one of our weights, with EXPERT where there is one tensor for each; None where they have none of it. Raises
    InvalidInput."""
    found = re.fullmatch(r"blocks\.(\d+)\.feed_forward\.(.+)", name)
    inner = NAMES[family(experts)].get(found[2]) if found else None
    return None if found is None or inner is None else f"model.layers.{found[1]}.{inner}"


def config_fields(model: ModelConfig, experts: ExpertsConfig) -> dict[str, object]:
    """Of config.json, what is other than a Llama's. Raises InvalidInput."""
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
