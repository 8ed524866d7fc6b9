"""A rank's part of the training state: weights and optimizer moments as named boxes, and how they are filled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

from concertina_state.errors import BadInput
from concertina_state.format.read_plan import ReadPlan, reads
from concertina_state.format.shardfile import Chunk, Header, Layout, layout_digest
from concertina_state.tensors import NAMES, ShardReader, execute
from concertina_trainer.config import TrainerConfig
from concertina_trainer.format.hf_names import MODEL
from concertina_trainer.model.decoder import Decoder, initial_weight
from concertina_trainer.model.optimizer import ShardedAdamW, local
from concertina_trainer.parallel.parallel import DistContext


@dataclasses.dataclass(frozen=True)
class LocalChunk:
    chunk: Chunk
    tensor: Tensor
    """The live local tensor."""


class TrainState:
    """Everything that a snapshot holds, as this rank has it."""

    def __init__(self, model: Decoder, optimizer: ShardedAdamW, world: DistContext) -> None:
        self._model, self._optimizer = model, optimizer
        parts = {f"model.{name}": (name, p) for name, p in model.named_parameters()}
        boxes = {name: _box(p) for name, p in model.named_parameters()}
        wholes = [(name, NAMES[p.dtype], tuple(p.shape)) for name, p in model.named_parameters()]
        self.digest = layout_digest(wholes, f"adamw, dimension 0 over {world.size}")
        live = {key: (name, local(p.detach())) for key, (name, p) in parts.items()}
        for kind, moments in optimizer.moments().items():
            live |= {f"optimizer.{kind}.{name}": (name, moment) for name, moment in moments.items()}
        self.chunks = [
            LocalChunk(Chunk(key, NAMES[tensor.dtype], *boxes[name]), tensor)
            for key, (name, tensor) in live.items()
            if tensor.numel()
        ]
        self._names = frozenset(live)
        self.layout = Layout([local_chunk.chunk for local_chunk in self.chunks])
        self._by_name = {local_chunk.chunk.name: local_chunk.tensor for local_chunk in self.chunks}
        self.tensors = [self._by_name[chunk.name] for chunk in self.layout.chunks]
        """In the layout's order."""

    @torch.no_grad()
    def initialise(self, config: TrainerConfig) -> None:
        """Step 0: weights from the seed alone, moments 0."""
        for name, parameter in self._model.named_parameters():
            target = local(parameter.detach())
            if target.numel():
                offsets, shape, whole = _box(parameter)
                value = initial_weight(name, torch.Size(whole), config.model, config.seed)
                target.copy_(value[tuple(slice(o, o + s) for o, s in zip(offsets, shape, strict=True))])
        for moments in self._optimizer.moments().values():
            for moment in moments.values():
                moment.zero_()
        self._optimizer.set_step(0)

    def plan(self, held: Mapping[int, Header]) -> ReadPlan:
        """What to read of a saved state of which these are the shards' headers, whatever world they were written by.
        Raises BadInput where it is not a whole state of this model."""
        for header in held.values():
            foreign = next((name for name in header.chunks if name not in self._names), None)
            if foreign is not None:
                raise BadInput(
                    f"the saved state holds {foreign}, which the model has no place for: restore the model's "
                    "configuration, or start a new run under another checkpoint.uri."
                )
            for wanted in (local_chunk.chunk for local_chunk in self.chunks):
                stored = header.chunks.get(wanted.name)
                if stored and (stored.chunk.global_shape, stored.chunk.dtype) != (wanted.global_shape, wanted.dtype):
                    raise BadInput(
                        f"{wanted.name} was saved as {stored.chunk.dtype} {list(stored.chunk.global_shape)} and "
                        f"the model has {wanted.dtype} {list(wanted.global_shape)}: restore the model's "
                        "configuration, or start a new run under another checkpoint.uri."
                    )
        plan = reads(held, self.layout.chunks)
        plan.require("the saved state")
        return plan

    def load(self, plan: ReadPlan, shards: Mapping[int, ShardReader], step: int) -> None:
        """Fill everything as was planned; `step` finished steps have led to it."""
        execute(plan, shards, self._by_name)
        self._optimizer.set_step(step)

    def load_weights(self, shards: Sequence[ShardReader], whence: str) -> None:
        """Fill the weights alone, of whatever dtype they are; the rest stays as it is. Raises BadInput where they are
        not those of this model."""
        known = {name for name, _ in self._model.named_parameters()}
        weights = [chunk for chunk in self.layout.chunks if chunk.name.startswith(MODEL)]
        held = {number: shard.header for number, shard in enumerate(shards)}
        for header in held.values():
            for name, stored in header.chunks.items():
                if name.startswith(MODEL) and name.removeprefix(MODEL) not in known:
                    raise BadInput(
                        f"{whence} has {name.removeprefix(MODEL)} {list(stored.chunk.global_shape)}, which this model "
                        "has not: correct spec.trainer.model, or begin with other weights."
                    )
            for chunk in weights:
                saved = header.chunks.get(chunk.name)
                if saved and saved.chunk.global_shape != chunk.global_shape:
                    raise BadInput(
                        f"{chunk.name.removeprefix(MODEL)} is {list(saved.chunk.global_shape)} in {whence} and "
                        f"{list(chunk.global_shape)} in this model: correct spec.trainer.model, or begin with "
                        "other weights."
                    )
        plan = reads(held, weights)
        plan.require(whence)
        execute(plan, dict(enumerate(shards)), self._by_name)


def _box(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Offsets, shape and whole shape of this rank's part of a parameter."""
    boxes = _create_chunk_list(parameter)
    if not boxes:
        return (0,) * parameter.dim(), (0,) * parameter.dim(), tuple(parameter.shape)
    return tuple(boxes[0].offsets), tuple(boxes[0].sizes), tuple(parameter.shape)
