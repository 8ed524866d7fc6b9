"""Layers of the model that one rank computes: the whole model, or one or more pipeline stages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence

from torch import Tensor, nn

from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.model.attention import Context
from concertina_trainer.model.decoder import Decoder, StageLayers
from concertina_trainer.model.experts import MixtureOfExperts
from concertina_trainer.model.optimizer import first_holder
from concertina_trainer.model.own import OwnModel


class Stages:
    """Layers of the model that one rank computes: the whole model, or one or more pipeline stages."""

    def __init__(self, parts: Sequence[Decoder], own: OwnModel | None = None) -> None:
        """Store pipeline stages of the decoder (one stage if it is not divided), or the custom model `own`."""
        self.parts, self.own = parts, own

    @property
    def whole(self) -> Decoder | OwnModel:
        """The whole model, for a model that is not divided into pipeline stages."""
        if self.own is not None:
            return self.own
        [part] = self.parts
        return part

    @property
    def predicts_tokens(self) -> bool:
        """True if the loss is the cross entropy of tokens. A custom model can have another loss."""
        return self.own is None or self.own.own.config.model.hf is not None

    @property
    def context(self) -> Context | None:
        return self.parts[0].context if self.parts else None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once, by its name in the whole model."""
        if self.own is not None:
            yield from self.own.model.named_parameters()
        for part in self.parts:
            yield from part.named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that are saved with the state, by name."""
        if self.own is not None:
            yield from self.own.saved_buffers()
        for part in self.parts:
            yield from part.named_buffers()

    def mixtures(self) -> Iterator[tuple[int, MixtureOfExperts]]:
        """Yield this rank's mixtures of experts, with the numbers of their layers in the whole model."""
        for part in self.parts:
            for layer, block in part.blocks.items():
                if isinstance(block.feed_forward, MixtureOfExperts):
                    yield int(layer), block.feed_forward

    def embeddings(self) -> set[str]:
        """Return the names of the parameters of this rank that are tables of embeddings."""
        if self.own is None:
            return {"embedding.weight"}
        modules = self.own.model.named_modules()
        return {f"{name}.weight".lstrip(".") for name, module in modules if isinstance(module, nn.Embedding)}

    def blocks(self) -> Collection[str]:
        """Return the prefixes of the names of parameters in blocks. A prefix is a block's name in the whole model.

        A prefix has no dot at its end.
        """
        return {"blocks"} if self.own is None else self.own.blocks.keys()

    def modules(self) -> Iterator[nn.Module]:
        if self.own is not None:
            yield from self.own.modules()
        for part in self.parts:
            yield from part.modules()

    def counts(self, name: str, parameter: Tensor) -> bool:
        """Return whether this rank counts its shard of the parameter in sums over all ranks.

        If several ranks hold the same shard, only the first of these ranks counts it. The sum then includes each shard
        once.

        A tied embedding has a copy in the first and in the last pipeline stage. The last stage does not count its copy.
        """
        repeated = self.own is None and name.startswith("embedding.") and not any(p.part.first for p in self.parts)
        return first_holder(parameter) and not repeated


def divided(config: ModelConfig, stages: int) -> list[StageLayers]:
    """Divide the decoder's layers into contiguous pipeline stages whose computation takes about the same time.

    The output layer costs as much as several blocks, so the last stage has fewer blocks. Each stage has at least one
    block.
    """
    active = config.experts.active_per_token if config.experts else 0
    head = config.vocab_size * config.dim / config.routed_block_weights(active)
    others = stages - 1

    def dearest(last: int) -> float:
        return max(last + head, math.ceil((config.layers - last) / others) if others else 0)

    last = config.layers if not others else min(range(1, config.layers - others + 1), key=dearest)
    blocks_per_stage, remainder = divmod(config.layers - last, max(1, others))
    # The later stages get the remaining blocks, because the first stage keeps the activations of the most microbatches.
    sizes = [blocks_per_stage + (i >= others - remainder) for i in range(others)] + [last]
    ends = list(itertools.accumulate(sizes))
    return [
        StageLayers(range(end - size, end), first=i == 0, last=i == others)
        for i, (end, size) in enumerate(zip(ends, sizes, strict=True))
    ]
