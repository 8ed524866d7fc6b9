"""Names of the bundled decoder's weights in Hugging Face's Llama, which has the same arithmetic.

Export writes these names, and initFrom reads them.
"""

from __future__ import annotations

import re

from concertina_trainer.config.model_config import ModelConfig

MODEL = "model."
"""Prefix of the names of weights in a checkpoint. Moments have other prefixes."""
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
"""Patterns of this project's names, and templates of the Hugging Face names."""


def theirs(name: str) -> str | None:
    """Return the Hugging Face name of a weight (without MODEL), or None if there is none."""
    for pattern, template in NAMES:
        if match := re.fullmatch(pattern, name):
            return match.expand(template)
    return None


def ours(name: str) -> str | None:
    """Return this project's name of a Hugging Face weight, or None if there is none."""
    for pattern, template in NAMES:
        if match := re.fullmatch(re.escape(template).replace(re.escape(r"\1"), r"(\d+)"), name):
            plain = pattern.replace("\\.", ".")
            return plain.replace(r"(\d+)", match[1]) if match.groups() else plain
    return None


def config_json(model: ModelConfig) -> dict[str, object]:
    """Return the config.json of the same model."""
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
