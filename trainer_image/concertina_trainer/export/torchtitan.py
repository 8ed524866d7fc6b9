"""Export of a checkpoint as a folder from which torchtitan continues the training of a Llama model.

torchtitan saves folders of torch.distributed.checkpoint (DCP). torchtitan's names of tensors, and its layout of
queries, keys and values, differ from those of this project.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.errors import InvalidInput
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.optimizer_config import OptimizerConfig
from concertina_trainer.config.optimizer_kinds import OptimizerName
from concertina_trainer.config.positions_config import RotaryPairs
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.export.export import trainer_of
from concertina_trainer.format import hf_config, titan_names
from concertina_trainer.format.hf_names import MODEL
from concertina_trainer.model.optimizer import settings
from trainingjob import dcp
from trainingjob._dcp_entries import DerivedArray, Entry, StoredArray, Value

OPTIMIZER, EMBEDDING, HEAD_OF_TITAN = "optimizer", "embedding.weight", "lm_head.weight"
FIRST = r"blocks\.(\d+)\.attention\.query\.weight"
"""Regular expression for the first of three weights that torchtitan's model stores as one parameter."""
FURTHER = r"blocks\.\d+\.attention\.(?:key|value)\.weight"
ROTATED = r"\.attention\.(?:query|key)\.weight$"
"""Regular expression for weights and moments whose order of rows depends on which elements form a rotated pair."""


def convert(uri: str, folder: str | os.PathLike[str], advance: Callable[[int], None] = lambda size: None) -> str:
    """Write a checkpoint as a folder `step-<number>` of torchtitan, with weights, moments and the number of steps.

    The folder contains no position in torchtitan's data, so torchtitan must not load its data loader from the folder.

    Args:
        uri: URI of a checkpoint or of a run's folder. In a run's folder, the checkpoint that LATEST names is written.
        folder: Empty or new folder on this machine.
        advance: Function that is called with the number of bytes just read.

    Returns:
        The URI of the checkpoint.

    Raises:
        InvalidInput: When torchtitan's Llama does not compute the same as the model, the optimizer is not AdamW, or the
            checkpoint is damaged.
        StorageError: When storage can't be read.
    """
    return dcp.write(uri, folder, _arranged, advance)


def _arranged(checkpoint: StoredCheckpoint, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the entries of a checkpoint of the bundled trainer under torchtitan's names."""
    trainer = trainer_of(checkpoint)
    _check(checkpoint.uri, trainer)
    step = checkpoint.manifest.id.step
    arrays = {entry.name: entry for entry in entries.values() if isinstance(entry, StoredArray)}
    arranged = [
        *_weights(checkpoint.uri, arrays, trainer.model),
        *_moments(arrays, trainer, step),
        Value(("train_state", "step"), step),
        Value(("train_state", "ntokens_seen"), step * trainer.global_batch_size * trainer.model.sequence_length),
        Value(("lr_scheduler", "last_epoch"), step),
    ]
    return {".".join(map(str, entry.path)): entry for entry in arranged}


def _check(uri: str, trainer: TrainerConfig) -> None:
    """Check that torchtitan's Llama and its AdamW compute the same as the bundled trainer.

    Raises:
        InvalidInput: When torchtitan computes something else.
    """
    rotated = trainer.model.model_copy(update={"rotary_pairs": RotaryPairs.halves})
    family = None if trainer.model.custom or trainer.model.lora else hf_config.family_of(rotated)
    if family is None or family[0] != "llama":
        raise InvalidInput(
            f"{uri} has another model than torchtitan's Llama: export it for torch.distributed.checkpoint (--to dcp)."
        )
    if trainer.optimizer.name is not OptimizerName.adamw:
        raise InvalidInput(
            f"{uri} has moments of {trainer.optimizer.name.value}, and torchtitan's optimizer is AdamW: export it for "
            "torch.distributed.checkpoint (--to dcp)."
        )


def _weights(uri: str, arrays: Mapping[str, StoredArray], model: ModelConfig) -> Iterator[Entry]:
    for name in _weight_names(arrays):
        exported_name = titan_names.theirs(name)
        if exported_name is None:
            raise InvalidInput(f"{uri} has a weight {name}, which torchtitan's Llama does not have.")
        yield _entry((exported_name,), [arrays[f"{MODEL}{name}"]], model)
        if name == EMBEDDING and model.tie_embeddings:
            yield _entry((HEAD_OF_TITAN,), [arrays[f"{MODEL}{name}"]], model)


def _moments(arrays: Mapping[str, StoredArray], trainer: TrainerConfig, step: int) -> Iterator[Entry]:
    for exported_name, names in _parameters(_weight_names(arrays)).items():
        state, group = f"state.{exported_name}", f"param_groups.{exported_name}"
        for moment in trainer.optimizer.moments(False):
            sources = [arrays[f"{OPTIMIZER}.{moment}.{name}"] for name in names]
            yield _entry((OPTIMIZER, f"{state}.{moment}"), sources, trainer.model)
        yield Value((OPTIMIZER, f"{state}.step"), torch.tensor(float(step)))
        for option, value in _options(trainer.optimizer, names[0], arrays[f"{MODEL}{names[0]}"]).items():
            yield Value((OPTIMIZER, f"{group}.{option}"), value)


def _weight_names(arrays: Mapping[str, StoredArray]) -> list[str]:
    return [name.removeprefix(MODEL) for name in arrays if name.startswith(MODEL)]


def _parameters(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of the weights in each parameter of torchtitan's model, keyed by the parameter's name.

    In torchtitan's model, query, key and value are one parameter.
    """
    parameters: dict[str, list[str]] = {}
    for name in names:
        exported_name = titan_names.theirs(name)
        assert exported_name is not None  # `_weights` has checked it
        if match := re.fullmatch(FIRST, name):
            layer = match[1]
            parameters[titan_names.FUSED.format(layer)] = [
                f"blocks.{layer}.attention.{kind}.weight" for kind in ("query", "key", "value")
            ]
        elif not re.fullmatch(FURTHER, name):
            parameters[exported_name] = [name]
    return parameters


def _options(config: OptimizerConfig, name: str, weight: StoredArray) -> dict[str, Any]:
    """Return the options of a parameter's group in torch's AdamW, which torchtitan loads from the folder."""
    own = settings(config, name, torch.empty(weight.shape, device="meta"), {EMBEDDING})
    rate, values = config.learning_rate * own.learning_rate_factor, config.hyperparameters
    return {
        "lr": rate, "initial_lr": rate, "betas": tuple(values["betas"]), "eps": values["epsilon"],
        "weight_decay": own.weight_decay, "amsgrad": False, "maximize": False, "foreach": False, "capturable": False,
        "differentiable": False, "fused": True, "decoupled_weight_decay": True,
    }  # fmt: skip


def _entry(path: tuple[str, ...], sources: Sequence[StoredArray], model: ModelConfig) -> Entry:
    """Return an entry for one array, or for the rows of query, key and value (`titan_names.FUSED`)."""
    head_dim, keys = model.resolved_head_dim, model.resolved_kv_heads
    reordered = [model.rotary_pairs is RotaryPairs.halves and bool(re.search(ROTATED, each.name)) for each in sources]
    if sources[1:] == [] and not any(reordered):
        return dataclasses.replace(sources[0], path=path)

    def compute(tensors: Sequence[Tensor]) -> Tensor:
        pairs = zip(tensors, reordered, strict=True)
        ordered = [_adjacent(tensor, head_dim) if turn else tensor for tensor, turn in pairs]
        return torch.cat([tensor.unflatten(0, (keys, -1)) for tensor in ordered], 1).flatten(0, 1)

    shape = (sum(source.shape[0] for source in sources), *sources[0].shape[1:])
    return DerivedArray(path, tuple(sources), compute, sources[0].dtype, shape)


def _adjacent(tensor: Tensor, head_dim: int) -> Tensor:
    """Return the rows `[heads * head_dim, columns]` in an order in which the elements of a rotated pair are adjacent.

    In the input, a pair consists of an element of the first half of the head and an element of the second half.
    """
    heads = tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:])
    return heads.transpose(1, 2).flatten(0, 2)
