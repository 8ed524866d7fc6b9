"""Export of a checkpoint's weights as safetensors, with the names of the model's own state dict."""

from __future__ import annotations

from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.errors import InvalidInput
from concertina_trainer.export.export import (
    AVERAGES,
    Export,
    Part,
    Tensor,
    require_average,
    shards_of,
    trainer_of,
    whole_chunks,
)
from concertina_trainer.format.hf_names import MODEL


def export(checkpoint: StoredCheckpoint, ema: bool = False) -> Export:
    """Return the export of the weights of any model of the bundled trainer, including custom models.

    Adapters and frozen weights are exported separately, without merging or conversion.

    Args:
        checkpoint: Checkpoint to export.
        ema: Whether to export the average of each weight. A frozen weight has no average, and is exported unchanged.

    Raises:
        InvalidInput: When the bundled trainer has not saved the checkpoint, or the checkpoint has no average.
        StorageError: When storage can't be read.
    """
    if not checkpoint.manifest.trainer:
        raise InvalidInput(
            f"{checkpoint.uri} was not saved by the bundled trainer: export it for torch.distributed.checkpoint (--to "
            "dcp)."
        )
    trainer = trainer_of(checkpoint)
    shards = shards_of(checkpoint, trainer.model)
    wholes = whole_chunks(shards, trainer.model)
    if ema:
        require_average(checkpoint, trainer)
        wholes |= whole_chunks(shards, trainer.model, AVERAGES)
    tensors = [
        Tensor(name.removeprefix(MODEL), (Part(chunk),), chunk.global_shape) for name, chunk in sorted(wholes.items())
    ]
    return Export(checkpoint.uri, shards, tensors, {})
