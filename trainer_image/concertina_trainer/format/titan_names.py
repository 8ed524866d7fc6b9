"""Names that torchtitan's Llama gives to the weights and moments of this project's decoder.

Source: torchtitan 0.1 to 0.3, models/llama3.
"""

from __future__ import annotations

import re

LAYER = r"(\d+)"
_NAMES = (
    ("embedding.weight", "tok_embeddings.weight", ()),
    ("head.weight", "lm_head.weight", ("output.weight",)),
    ("norm.weight", "norm.weight", ()),
    *(
        (f"blocks.{{}}.attention.{own}.weight", f"layers.{{}}.attention.qkv_linear.{theirs}.weight", (old,))
        for own, theirs, old in (
            ("query", "wq", "layers.{}.attention.wq.weight"),
            ("key", "wk", "layers.{}.attention.wk.weight"),
            ("value", "wv", "layers.{}.attention.wv.weight"),
        )
    ),
    ("blocks.{}.attention.output.weight", "layers.{}.attention.wo.weight", ()),
    ("blocks.{}.feed_forward.gate.weight", "layers.{}.feed_forward.w1.weight", ()),
    ("blocks.{}.feed_forward.down.weight", "layers.{}.feed_forward.w2.weight", ()),
    ("blocks.{}.feed_forward.up.weight", "layers.{}.feed_forward.w3.weight", ()),
    ("blocks.{}.attention_norm.weight", "layers.{}.attention_norm.weight", ()),
    ("blocks.{}.feed_forward_norm.weight", "layers.{}.ffn_norm.weight", ()),
)
"""Each weight's name in this project, its name in torchtitan 0.3, and its names in earlier versions.

`{}` stands for the number of the layer.
"""
FUSED = "layers.{}.attention.qkv_linear.wqkv.weight"
"""Name in torchtitan of the moments of query, key and value, which are one tensor although the weights are three.

For each key head, the tensor contains the rows of the query heads, then the rows of the key, then the rows of the
value.
"""
_OURS = {pattern: own for own, theirs, earlier in _NAMES for pattern in (theirs, *earlier)}
_THEIRS = {own: theirs for own, theirs, _ in _NAMES}


def ours(name: str) -> str | None:
    """Return this project's name of a weight of torchtitan's Llama, or None for another name."""
    return _renamed(name, _OURS)


def theirs(name: str) -> str | None:
    """Return the name in torchtitan's Llama of a weight of this project, or None if Llama has no such weight."""
    return _renamed(name, _THEIRS)


def fused_layer(name: str) -> str | None:
    """Return the number of the layer if a tensor contains the rows of query, key and value (FUSED), otherwise None."""
    match = re.fullmatch(re.escape(FUSED).replace(r"\{\}", LAYER), name)
    return match[1] if match else None


def _renamed(name: str, names: dict[str, str]) -> str | None:
    match = re.search(r"\.(\d+)\.", name)
    layer = match[1] if match else ""
    renamed = names.get(re.sub(r"\.\d+\.", ".{}.", name, count=1))
    return None if renamed is None else renamed.format(layer)
