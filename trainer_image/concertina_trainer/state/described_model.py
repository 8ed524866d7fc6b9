"""Model that a round trains, for a job that sets `spec.trainer.model.from`.

The first round reads the model from config.json. Later rounds read the model from the configuration in the saved state,
so the folder with config.json is no longer needed.

A round is a period in which a fixed set of replicas trains.

See decision "The trainer reads config.json".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from concertina_protocol import Restore, RestoreSource
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import ObjectPrefix, StorageError
from concertina_state.objects.retry import final
from concertina_state.saved import InMemory, Requests
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.format import hf_config


def with_described_model(config: TrainerConfig, start: Restore, channel: Requests) -> tuple[TrainerConfig, str]:
    """Return the configuration with all fields of the model, and a sentence that names their source.

    Raises:
        InvalidInput: When the model can't be read, is not supported by the decoder, or contradicts the spec. Also when
            the saved state is damaged and the model's folder no longer exists.
        RestoreFailed: When the state in memory can't be read.
        StorageError: When storage can't be read.
    """
    if config.model.hf is not None:
        return _with_options(config, config.model.hf, start, channel)
    uri = config.model.from_
    if uri is None:
        return config, ""
    unreadable: Exception | None = None
    try:
        saved = _saved(start, channel)
    except (InvalidInput, StorageError) as error:
        # Restoring reports what is damaged, and takes an older checkpoint if the job allows it.
        saved, unreadable = None, error
    left_out = ""
    if saved is not None and saved.from_ == uri:
        found, where = saved, f"the saved state of step {start.step}"
    else:
        try:
            described, where = _described(uri), f"{uri}/{hf_config.NAME}"
            found, left_out = described.model(), described.left_out
        except (InvalidInput, StorageError) as error:
            # The folder may be gone since the first round, so the state is what has to be mended.
            raise unreadable or error from error
    whole = filled_config(config, found, where)
    kind = hf_config.family_of(whole.model)
    name = kind[0] if kind else "a decoder"
    return whole, (
        f"the model is the one in {where}: {name}, {whole.model.layers} layers, {_read_weights(whole.model):,} weights"
        + (f". {left_out}" if left_out else "")
    )


def _with_options(config: TrainerConfig, uri: str, start: Restore, channel: Requests) -> tuple[TrainerConfig, str]:
    """Return the configuration with the fields of the config.json of `model.hf`, and a sentence about the model.

    Raises:
        InvalidInput: When config.json can't be read, or contradicts the options in the spec.
        RestoreFailed: When the state in memory can't be read.
        StorageError: When storage can't be read.
    """
    saved, unreadable = None, None
    try:
        saved = _saved(start, channel)
    except (InvalidInput, StorageError) as error:
        unreadable = error  # restoring reports it, as above
    if saved is not None and saved.hf == uri and saved.options is not None:
        options, where = saved.options, f"the saved state of step {start.step}"
    else:
        try:
            options, where = read_options(uri), f"{uri}/{hf_config.NAME}"
        except (InvalidInput, StorageError) as error:
            raise unreadable or error from error
    if config.model.options not in (None, options):
        raise InvalidInput(f"spec.trainer.model.options differ from {where}, which hf reads: remove options.")
    model = ModelConfig.model_validate({**config.model.model_dump(by_alias=True), "options": options})
    whole = TrainerConfig.model_validate({**config.model_dump(by_alias=True), "model": model})
    return whole, (
        f"the model is the one in {where}: {options.get('model_type')}, computed by transformers, without dropout"
    )


def read_model_setting(model: ModelConfig, layers: int, weights: int, left_out: str) -> dict[str, str]:
    """Return the model that was read for `model.from` or `model.hf`, as an entry of `status.settings`.

    Every round reports the same value, because a round that restores a saved state no longer reads config.json. The
    result is empty if the spec itself sets all fields of the model.

    Args:
        model: Model with all fields.
        layers: Number of layers of a model of transformers.
        weights: Number of weights of a model of transformers.
        left_out: Name of the part of the files that transformers does not load, or "".
    """
    if model.hf is not None:
        field, kind, without = "model.hf", (model.options or {}).get("model_type"), left_out
    elif model.from_ is not None:
        found = hf_config.family_of(model)
        kind, prediction_layers = (found[0], found[1].prediction_layers) if found else ("a decoder", "")
        without = f"the layers of {prediction_layers}" if prediction_layers else ""
        field, layers, weights = "model.from", model.layers, _read_weights(model)
    else:
        return {}
    size = f"{kind} with {layers} layers and {weights:,} weights"
    return {field: f"{size}, without {without}" if without else size}


def _read_weights(model: ModelConfig) -> int:
    """Return the number of weights in the files of a model, without adapters, which the files do not contain."""
    return model.model_copy(update={"lora": None}).weights


def read_options(uri: str) -> dict[str, Any]:
    """Return the fields of the config.json in a folder, without those that do not describe the model.

    Raises:
        InvalidInput: When there is no config.json, or it can't be read.
        StorageError: When storage can't be read.
    """
    text = final(lambda: ObjectPrefix(uri).get(hf_config.NAME))
    if text is None:
        raise InvalidInput(f"{uri} has no {hf_config.NAME}: correct spec.trainer.model.hf.")
    return hf_config.fields_of(text, f"{uri}/{hf_config.NAME}")


def filled_config(config: TrainerConfig, found: ModelConfig, where: str) -> TrainerConfig:
    """Return a copy of the configuration with all fields of the described model.

    Raises:
        InvalidInput: When the configuration contradicts the model, or can't be used with it.
    """
    model = hf_config.filled(config.model, found, where)
    try:
        return TrainerConfig.model_validate({**config.model_dump(by_alias=True), "model": model})
    except ValidationError as error:
        messages = "; ".join(each["msg"] for each in error.errors())
        raise InvalidInput(f"spec.trainer can't be used with the model of {where}: {messages}.") from error


def read_model(uri: str) -> ModelConfig:
    """Return the model that the config.json in a folder describes.

    Raises:
        InvalidInput: When there is no config.json, or the decoder does not support its model.
        StorageError: When storage can't be read.
    """
    return _described(uri).model()


def _described(uri: str) -> hf_config.Described:
    text = final(lambda: ObjectPrefix(uri).get(hf_config.NAME))
    if text is None:
        raise InvalidInput(f"{uri} has no {hf_config.NAME}: correct spec.trainer.model.from.")
    return hf_config.read(text, f"{uri}/{hf_config.NAME}")


def _saved(start: Restore, channel: Requests) -> ModelConfig | None:
    """Return the model in the configuration of the saved state, or None if the round begins without a saved state.

    Raises:
        InvalidInput: When the checkpoint is damaged.
        RestoreFailed: When the state in memory can't be read.
        StorageError: When storage can't be read.
    """
    if start.source == RestoreSource.MEMORY and start.id is not None:
        trainer: Mapping[str, Any] = json.loads(InMemory(start.id, channel).header(0).trainer or "{}")
    elif start.source == RestoreSource.STORAGE and start.durable is not None:
        trainer = StoredCheckpoint(start.durable.uri).manifest.trainer
    else:
        return None
    try:
        return ModelConfig.model_validate(trainer["model"]) if "model" in trainer else None
    except ValidationError:
        return None
