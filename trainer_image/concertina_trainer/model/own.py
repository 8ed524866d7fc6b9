"""A model of one's own, as the frame has it: loaded, refused where the frame can't keep its promises, and made one
module with its loss."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import math
import os
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from concertina_state.errors import InvalidInput
from concertina_state.format.read_plan import Box
from concertina_trainer.config.memory_config import Activations
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.model.decoder import computed_again
from concertina_trainer.model.initial import usual
from concertina_trainer.model.spec import DataShape, ModelSpec

SAME = 1e-2
"""By how much a loss and what its weights say of it may differ, relatively: by rounding, in whatever precision."""


@dataclasses.dataclass(frozen=True)
class OwnSpec:
    """A ModelSpec with its arguments.

    An error that it raises becomes InvalidInput, since it would raise it again in any round.
    """

    config: TrainerConfig
    data: DataShape

    @property
    def _name(self) -> str:
        return str(self.config.model.entrypoint)

    @functools.cached_property
    def spec(self) -> ModelSpec:
        return loaded(self._name)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.config.model.options or {})

    def module(self) -> nn.Module:
        """On the meta device, checked."""
        with self._asked("build"), torch.device("meta"):
            module = self.spec.build(self.options, self.data)
        self._check(module)
        return module

    def blocks(self, module: nn.Module) -> dict[str, nn.Module]:
        """By name."""
        with self._asked("blocks"):
            wanted = list(self.spec.blocks(module))
        names = {id(part): name for name, part in module.named_modules()}
        found = {names.get(id(block), ""): block for block in wanted}
        nested = [name for name in found for other in found if name.startswith(f"{other}.")]
        if "" in found or nested:
            raise InvalidInput(
                f"blocks of {self._name} gives {nested[0] if nested else 'what is no part of the module'}: give parts "
                "of it, none within another."
            )
        if not found and self.config.memory.activations is not Activations.keep:
            raise InvalidInput(
                f"trainer.memory.activations computes blocks again, and {self._name} names none: give "
                "ModelSpec.blocks, or set activations to Keep."
            )
        return found

    def initial(self, name: str, whole: Sequence[int], box: Box) -> Tensor:
        with self._asked("initial"):
            value = (self.spec.initial or usual)(name, whole, box, self.config.seed)
        if not isinstance(value, Tensor) or tuple(value.shape) != tuple(box.shape):
            gives = f"the shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise InvalidInput(
                f"initial of {self._name} gives {gives} for {name}, of which it was asked for a box of shape "
                f"{list(box.shape)}: give a tensor of that shape for each name."
            )
        return value

    def flops(self) -> float | None:
        """Of one element."""
        if self.spec.flops is None:
            return None
        with self._asked("flops"), torch.device("meta"):
            return float(self.spec.flops(self.options, self.data))

    @contextlib.contextmanager
    def _asked(self, what: str) -> Iterator[None]:
        try:
            yield
        except InvalidInput:
            raise
        except Exception as error:
            traceback.print_exc()
            raise InvalidInput(
                f"{what} of trainer.model.entrypoint {self._name} raised {said(error)}: correct it, or "
                "trainer.model.options."
            ) from error

    def _check(self, module: object) -> None:
        """Raises InvalidInput for what would be another thing on each rank, or in each world."""
        if not isinstance(module, nn.Module):
            raise InvalidInput(
                f"build of {self._name} gives a {type(module).__name__}: it has to give a torch.nn.Module."
            )
        parameters = dict(module.named_parameters(remove_duplicate=False))
        if not any(each.requires_grad for each in parameters.values()):
            raise InvalidInput(
                f"the model of {self._name} has no parameters that require a gradient: nothing is trained."
            )
        for name, each in parameters.items():
            if each.device.type != "meta" or each.dtype != torch.float32 or not each.dim():
                raise InvalidInput(
                    f"the parameter {name} of {self._name} is {each.dtype} of shape {list(each.shape)} on "
                    f"{each.device}: parameters are float32, of one dimension or more, and made where torch makes them "
                    '(build is called under torch.device("meta")).'
                )
        if len(parameters) > len(list(module.parameters())):
            twice = next(name for name, _ in module.named_parameters(remove_duplicate=False)
                         if name not in dict(module.named_parameters()))  # fmt: skip
            raise InvalidInput(
                f"{twice} of {self._name} is a parameter that two modules have: let one have it, and use it in forward "
                "(torch.nn.functional.linear(x, self.embedding.weight))."
            )
        buffers = [name for name, _ in module.named_buffers()]
        if buffers and self.spec.initial is None:
            raise InvalidInput(
                f"the model of {self._name} has buffers ({', '.join(buffers[:3])}), and nothing says what they hold: "
                "give ModelSpec.initial, or compute them in forward."
            )


def own_spec(config: TrainerConfig, reader: Reader) -> OwnSpec | None:
    """Where the model is not the decoder."""
    width = reader.frames.width if reader.frames else 0
    return OwnSpec(config, DataShape(reader.length, reader.vocab_size, width)) if config.model.entrypoint else None


IN_ITS_IMAGE = "the image of the container trainer has to hold it, installed or on PYTHONPATH"


def loaded(entrypoint: str, remedy: str = IN_ITS_IMAGE) -> ModelSpec:
    """`remedy`: what to do where it can't be imported. Raises InvalidInput."""
    module, _, name = entrypoint.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        raise InvalidInput(
            f"trainer.model.entrypoint {entrypoint} can't be imported ({said(error)}): {remedy}."
        ) from error
    if not isinstance(found, ModelSpec):
        raise InvalidInput(
            f"trainer.model.entrypoint {entrypoint} is a {type(found).__name__}: it has to name a "
            "concertina_trainer.model.spec.ModelSpec."
        )
    return found


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:400].rstrip(".: ")


class OwnModel(nn.Module):
    """The model, and its loss as forward: weights are whole wherever the loss uses them."""

    def __init__(self, own: OwnSpec, dtype: torch.dtype) -> None:
        """`dtype`: of what is computed."""
        super().__init__()
        self.own, self._dtype = own, dtype
        self.model = own.module()
        self.blocks = own.blocks(self.model)
        for block in self.blocks.values():
            again = functools.partial(computed_again, own.config.memory.activations, True, block.forward)
            block.forward = again  # FSDP's hooks are around it
        self._still = [module for module in self.model.modules() if not module.training]
        """Parts that their author has put into eval(), and that stay so."""
        self.weights = sum(parameter.numel() for parameter in self.model.parameters())
        self.proved = False
        self._versions: list[int] = []

    @torch.no_grad()
    def fill_buffers(self) -> None:
        """Constants, and no part of the state."""
        for name, buffer in self.model.named_buffers():
            shape = tuple(buffer.shape)
            buffer.copy_(self.own.initial(name, shape, Box((0,) * len(shape), shape)))

    def forward(self, batch: Microbatch) -> Tensor:
        training = torch.is_grad_enabled()
        if self.training != training:
            self.train(training)
            for module in self._still:
                module.training = False
        if training and not self.proved:
            batch.weights.requires_grad_()
            self._versions = self._buffer_versions()
        torch.manual_seed(self._noise(batch))
        if batch.features is not None:
            batch = dataclasses.replace(batch, features=batch.features.to(self._dtype))
        loss = self.own.spec.loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.dim() or (training and not loss.requires_grad):
            raise InvalidInput(
                f"the loss of {self.own.config.model.entrypoint} is no scalar tensor that has a gradient."
            )
        return loss

    def prove(self, batch: Microbatch, loss: Tensor) -> None:
        """After the first backward of a round: the loss is a sum of its weights times something (Euler's theorem), and
        buffers are constant. Raises InvalidInput."""
        if self.proved:
            return
        self.proved = True
        name, weights = self.own.config.model.entrypoint, batch.weights.detach()
        found, each = float(loss), batch.weights.grad
        added = None if each is None else float((weights * each).sum())
        if math.isfinite(found) and (added is None or not math.isclose(found, added, rel_tol=SAME, abs_tol=1e-6)):
            raise InvalidInput(
                f"the loss of {name} is not the sum of each prediction's loss times its weight: with other numbers of "
                "workers it would be another. Multiply by microbatch.weights, add up, and divide by nothing."
            )
        if self._versions != self._buffer_versions():
            raise InvalidInput(
                f"the model of {name} writes into its buffers: each worker would have others. Use norms without "
                "running statistics (LayerNorm, GroupNorm)."
            )

    def _buffer_versions(self) -> list[int]:
        return [buffer._version for buffer in self.model.buffers()]

    def _noise(self, batch: Microbatch) -> int:
        """What is drawn while it computes (dropout) is a function of the run and the microbatch."""
        name = f"{self.own.config.seed}/{batch.samples[:1]}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")


def preload() -> None:
    """Of the job, in the parent that workers are forked from. What can't be imported the worker refuses."""
    model = json.loads(os.environ.get("CONCERTINA_TRAINER") or "{}").get("model", {})
    if entrypoint := model.get("entrypoint"):
        with contextlib.suppress(InvalidInput):
            loaded(entrypoint)
