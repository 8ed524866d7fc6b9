"""Export of low-rank adapters, without the model's frozen weights, in the format of the library PEFT.

The format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.errors import InvalidInput
from concertina_trainer.export.export import Export, Part, Tensor, trainer_of, whole_chunks
from concertina_trainer.format import adapters, hf_names
from concertina_trainer.format.hf_config import config_json
from concertina_trainer.format.hf_families import FAMILIES, Family

PREFIX = "base_model.model."
"""First part of the names of PEFT's tensors, before the Hugging Face name of the module."""
MATRICES = {f".{adapters.A}": ".lora_A.weight", f".{adapters.B}": ".lora_B.weight"}
"""Ends of the names of an adapter's matrices in PEFT, keyed by the end of the name in this project."""


def export(checkpoint: StoredCheckpoint) -> Export:
    """Return the export of the adapters of a checkpoint from a run with `trainer.model.lora`.

    Raises:
        InvalidInput: When the checkpoint has no adapters, or PEFT can't represent them.
        StorageError: When storage can't be read.
    """
    model = trainer_of(checkpoint).model
    if model.lora is None:
        raise InvalidInput(f"{checkpoint.uri} has no adapters: export it as a Hugging Face model (--to hf).")
    family = FAMILIES[config_json(model)["model_type"]]
    tensors = []
    for name, chunk in sorted(whole_chunks(checkpoint.shards, model).items()):
        if adapters.is_adapter(name):
            layer, _, end = name.rpartition(".")
            if f".{end}" not in MATRICES:
                raise InvalidInput(
                    f"{name} adapts experts, which have no module of their own in transformers: export the model with "
                    "its adapters added (--to hf)."
                )
            module = _module(layer.removeprefix(hf_names.MODEL), family)
            tensors.append(Tensor(f"{PREFIX}{module}{MATRICES[f'.{end}']}", (Part(chunk),), chunk.global_shape))
    frozen = checkpoint.manifest.frozen
    modules = {tensor.name.rpartition(".lora_")[0].rpartition(".")[2] for tensor in tensors}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": frozen.uri if frozen else None,
        "r": model.lora.rank,
        "lora_alpha": model.lora.alpha,
        "lora_dropout": model.lora.dropout,
        "target_modules": sorted(modules),
        "bias": "none",
        "inference_mode": True,
    }
    message = ""
    if model.lora.frozen_dtype.quantized:
        message = (
            f"The adapters were trained beside weights in {model.lora.frozen_dtype.value}. Beside the original "
            "weights, the model has other results than in the run: --to hf exports a model with those of the run."
        )
    files = {"adapter_config.json": config}
    return Export(checkpoint.uri, checkpoint.shards, tensors, files, message, stem="adapter_model")


def _module(layer: str, family: Family) -> str:
    """Return the Hugging Face name of the module to which an adapter belongs.

    Raises:
        InvalidInput: When the Hugging Face module contains the rows of several weights, so that it has several
            adapters.
    """
    name = hf_names.theirs(f"{layer}{adapters.WEIGHT}", family)
    assert name is not None  # `config_json` found a family with these weights
    if len(hf_names.ours(name, family)) > 1:
        raise InvalidInput(
            f"The adapter of {layer} can't be exported alone, because {name} of {family.architecture} also has the "
            "rows of other weights: export the model with its adapters added (--to hf)."
        )
    return name.removesuffix(adapters.WEIGHT)
