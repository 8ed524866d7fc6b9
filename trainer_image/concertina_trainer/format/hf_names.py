"""Our decoder in the names of Hugging Face's Llama, whose arithmetic it has: what export writes and initFrom reads."""

from __future__ import annotations

import re

from concertina_trainer.config.model_config import ModelConfig

MODEL = "model."
"""What weights' names begin with in a checkpoint; moments have other prefixes."""
NAMES = (
    (r"embedding\.weight", "model.embed_tokens.weight"),
    (r"blocks\.(\d+)\.attention_norm\.weight", r"model.layers.\1.input_layernorm.weight"),
    (r"blocks\.(\d+)\.attention\.query\.weight", r"model.layers.\1.self_attn.q_proj.weight"),
    (r"blocks\.(\d+)\.attention\.key\.weight", r"model.layers.\1.self_attn.k_proj.weight"),
    (r"blocks\.(\d+)\.attention\.value\.weight", r"model.layers.\1.self_attn.v_proj.weight"),
    (r"blocks\.(\d+)\.attention\.output\.weight", r"model.layers.\1.self_attn.o_proj.weight"),
    (r"blocks\.(\d+)\.feed_forward_norm\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
    (r"blocks\.(\d+)\.feed_forward\.gate\.weight", r"model.layers.\1.mlp.gate_proj.weight"),
    (r"blocks\.(\d+)\.feed_forward\.up\.weight", r"model.layers.\1.mlp.up_proj.weight"),
    (r"blocks\.(\d+)\.feed_forward\.down\.weight", r"model.layers.\1.mlp.down_proj.weight"),
    (r"norm\.weight", "model.norm.weight"),
    (r"head\.weight", "lm_head.weight"),
)
"""Ours, and theirs."""


def theirs(name: str) -> str | None:
    """Of one of our weights (without MODEL); None where they have none of it."""
    for pattern, template in NAMES:
        if match := re.fullmatch(pattern, name):
            return match.expand(template)
    return None


def ours(name: str) -> str | None:
    """Of one of their weights."""
    for pattern, template in NAMES:
        if match := re.fullmatch(re.escape(template).replace(re.escape(r"\1"), r"(\d+)"), name):
            plain = pattern.replace("\\.", ".")
            return plain.replace(r"(\d+)", match[1]) if match.groups() else plain
    return None


def config_json(model: ModelConfig) -> dict[str, object]:
    """config.json of the same model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": model.dim,
        "head_dim": model.dim // model.heads,
        "intermediate_size": model.resolved_hidden_dim,
        "max_position_embeddings": model.sequence_length,
        "mlp_bias": False,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.resolved_kv_heads,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_embeddings,
        "use_cache": True,
        "vocab_size": model.vocab_size,
    }
