"""Custom models (`trainer.model.entrypoint`): loading, checks before training, and the loss."""

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from concertina_data.data_manifest import Field
from concertina_state.errors import InvalidInput
from concertina_state.format.read_plan import Box
from concertina_trainer.config.memory_config import Activations
from concertina_trainer.config.model_config import HF_ENTRYPOINT
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.model.decoder import computed_again
from concertina_trainer.model.initial import usual
from concertina_trainer.model.spec import DataShape, ModelSpec

SAME = 1e-2
"""Relative tolerance between a loss and the value that follows from the gradients of the prediction weights.

Both values have rounding errors, whose size depends on the precision of the computation.
"""


_OF_VECTORS = 3
"""Number of dimensions of a field whose values are vectors: `[rows, length + 1, width]`."""


def widths(fields: Sequence[Field]) -> dict[str, int]:
    """Return the width of each field, keyed by name, in the form of `DataShape.widths`."""
    return {field.name: field.width for field in fields}


@dataclasses.dataclass(frozen=True)
class OwnSpec:
    """ModelSpec of a custom model, with the arguments of its functions.

    A round is a period in which a fixed set of replicas trains. An error that one of the functions raises is converted
    to InvalidInput, because the function would fail again in any round.
    """

    config: TrainerConfig
    data: DataShape

    @property
    def _name(self) -> str:
        return self.config.model.named

    @functools.cached_property
    def spec(self) -> ModelSpec:
        return loaded(str(self.config.model.custom))

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.config.model.options or {})

    def module(self) -> nn.Module:
        """Build the module on the meta device, and check that it can be trained."""
        with self._as_invalid_input("build"), torch.device("meta"):
            module = self.spec.build(self.options, self.data)
        self._check(module)
        return module

    def blocks(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the model's blocks, keyed by the block's name in the module.

        Raises:
            InvalidInput: When a block is not a part of the module, when one block is within another, or when there are
                no blocks although activations are to be recomputed.
        """
        with self._as_invalid_input("blocks"):
            listed_blocks = list(self.spec.blocks(module))
        names = {id(part): name for name, part in module.named_modules()}
        blocks_by_name = {names.get(id(block), ""): block for block in listed_blocks}
        nested = [name for name in blocks_by_name for outer in blocks_by_name if name.startswith(f"{outer}.")]
        if "" in blocks_by_name or nested:
            raise InvalidInput(
                f"blocks of {self._name} returns {nested[0] if nested else 'something outside the module'}: return "
                "parts of the module, none of them inside another."
            )
        if not blocks_by_name and self.config.memory.resolved_activations is not Activations.keep:
            raise InvalidInput(
                f"trainer.memory.activations recomputes blocks, and {self._name} defines none: give "
                "ModelSpec.blocks, or set activations to Keep."
            )
        return blocks_by_name

    def initial(self, name: str, whole: Sequence[int], box: Box) -> Tensor:
        """Return the initial values of a box of the tensor `name`, as the model's own function computes them.

        `whole` is the shape of the tensor, and the box is a range of indices in each of its dimensions.

        Raises:
            InvalidInput: When the model's function fails, or does not return a tensor of the box's shape.
        """
        with self._as_invalid_input("initial"):
            value = (self.spec.initial or usual)(name, whole, box, self.config.seed)
        if not isinstance(value, Tensor) or tuple(value.shape) != tuple(box.shape):
            gives = f"the shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise InvalidInput(
                f"initial of {self._name} returns {gives} for {name}, but a box of shape {list(box.shape)} "
                "was requested: return a tensor of that shape for each name."
            )
        return value

    def flops(self) -> float | None:
        """Return the operations for one element (token or frame), forward and backward, or None if not stated."""
        if self.spec.flops is None:
            return None
        with self._as_invalid_input("flops"), torch.device("meta"):
            return float(self.spec.flops(self.options, self.data))

    @contextlib.contextmanager
    def _as_invalid_input(self, function: str) -> Iterator[None]:
        """Convert an exception of the model's function `function` to InvalidInput.

        Raises:
            InvalidInput: When the function raises an error.
        """
        try:
            yield
        except InvalidInput:
            raise
        except Exception as error:
            traceback.print_exc()
            raise InvalidInput(
                f"{function} of trainer.model.entrypoint {self._name} raised {said(error)}: correct the "
                "function or trainer.model.options."
            ) from error

    def _check(self, module: object) -> None:
        """Check that the trainer can shard and initialize the module, for any number of ranks.

        Raises:
            InvalidInput: When there is no trained parameter, when a parameter is not float32 on the meta device or is
                used by two modules, or when the values of buffers are neither computed by `build` nor given by
                `initial`.
        """
        if not isinstance(module, nn.Module):
            raise InvalidInput(
                f"build of {self._name} returns a {type(module).__name__}: it must return a torch.nn.Module."
            )
        parameters = dict(module.named_parameters(remove_duplicate=False))
        if not any(parameter.requires_grad for parameter in parameters.values()):
            raise InvalidInput(
                f"the model of {self._name} has no parameter that requires a gradient, so nothing would be trained."
            )
        for name, parameter in parameters.items():
            if parameter.device.type != "meta" or parameter.dtype != torch.float32 or not parameter.dim():
                raise InvalidInput(
                    f"the parameter {name} of {self._name} is {parameter.dtype} of shape "
                    f"{list(parameter.shape)} on {parameter.device}: parameters must be float32, have at "
                    "least one dimension, and be on torch's default device (build is called under "
                    'torch.device("meta")).'
                )
        # The modules of transformers that share a parameter are in one FSDP unit (`hf.blocks`).
        if len(parameters) > len(list(module.parameters())) and not self.config.model.hf:
            twice = next(name for name, _ in module.named_parameters(remove_duplicate=False)
                         if name not in dict(module.named_parameters()))  # fmt: skip
            raise InvalidInput(
                f"{twice} of {self._name} is a parameter of two modules: register it in one module, and use "
                "it from there in forward (torch.nn.functional.linear(x, self.embedding.weight))."
            )
        buffers = [name for name, buffer in module.named_buffers() if buffer.is_meta]
        if buffers and self.spec.initial is None:
            raise InvalidInput(
                f"the model of {self._name} has buffers ({', '.join(buffers[:3])}), and their content is "
                "unknown: give ModelSpec.initial, or compute the buffers in forward."
            )


def own_spec(config: TrainerConfig, reader: Reader) -> OwnSpec | None:
    """Return the job's custom model with its arguments, or None if the job trains the bundled decoder."""
    if not config.model.custom:
        return None
    return OwnSpec(config, DataShape(reader.length, reader.vocab_size, widths(reader.fields)))


IN_ITS_IMAGE = "install it in the image of the container trainer, or add its folder to PYTHONPATH there"


def loaded(entrypoint: str, remedy: str = IN_ITS_IMAGE) -> ModelSpec:
    """Import the ModelSpec that `entrypoint` names.

    The error message ends with `remedy`, which says what to do about a failed import.

    Raises:
        InvalidInput: When the import fails, or `entrypoint` does not name a ModelSpec.
    """
    module, _, name = entrypoint.partition(":")
    try:
        spec = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        raise InvalidInput(
            f"trainer.model.entrypoint {entrypoint} can't be imported ({said(error)}): {remedy}."
        ) from error
    if not isinstance(spec, ModelSpec):
        raise InvalidInput(
            f"trainer.model.entrypoint {entrypoint} is a {type(spec).__name__}: it must name a "
            "concertina_trainer.model.spec.ModelSpec."
        )
    return spec


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:400].rstrip(".: ")


class OwnModel(nn.Module):
    """Custom model as a module whose forward method computes the loss.

    FSDP gathers weights around the forward method, so all weights are whole when the loss is computed.
    """

    def __init__(self, own: OwnSpec, dtype: torch.dtype) -> None:
        """Build the model. Its computations are in `dtype`."""
        super().__init__()
        self.own, self._dtype = own, dtype
        self.model = own.module()
        self._constants = {name: buffer.clone() for name, buffer in self.model.named_buffers() if not buffer.is_meta}
        """Values of the buffers that the model's `build` function has computed."""
        self.blocks = own.blocks(self.model)
        for block in self.blocks.values():
            recomputed = functools.partial(computed_again, own.config.memory.resolved_activations, True, block.forward)
            block.forward = recomputed  # FSDP's hooks run before and after this function
        self._still = [module for module in self.model.modules() if not module.training]
        """Modules that the model's author has put into eval() mode. They stay in eval() mode during training."""
        self.weights = sum(parameter.numel() for parameter in self.model.parameters())
        self.proved = False
        self.proofs: list[Callable[[], None]] = []
        """Checks of the model's parallel layout, which `prove` runs."""
        self._versions: list[int] = []

    @torch.no_grad()
    def fill_buffers(self) -> None:
        """Fill the buffers with their initial values. Buffers are constants, and are not saved in checkpoints."""
        for name, buffer in self.model.named_buffers():
            shape = tuple(buffer.shape)
            buffer.copy_(self.initial(name, shape, Box((0,) * len(shape), shape)))

    def initial(self, name: str, whole: Sequence[int], box: Box) -> Tensor:
        """Return the initial values of a box of a parameter or buffer (see `OwnSpec.initial`)."""
        if name in self._constants:
            part = tuple(slice(begin, begin + size) for begin, size in zip(box.offsets, box.shape, strict=True))
            return self._constants[name][part]
        return self.own.initial(name, whole, box)

    def saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that are saved with the state: those that files of transformers' weights contain."""
        saved = self.model.state_dict(keep_vars=True) if self.own.config.model.hf else {}
        return ((name, buffer) for name, buffer in self.model.named_buffers() if name in saved)

    def forward(self, batch: Microbatch) -> Tensor:
        """Return the loss of a microbatch: the sum of each prediction's loss times its weight.

        Raises:
            InvalidInput: When the loss is not a scalar tensor with a gradient, or is float16 in training.
        """
        training = torch.is_grad_enabled()
        if self.training != training:
            self.train(training)
            for module in self._still:
                module.training = False
        if training and not self.proved:
            batch.weights.requires_grad_()
            self._versions = self._buffer_versions()
        torch.manual_seed(self._noise(batch))
        fields = {
            name: values.to(self._dtype) if values.is_floating_point() and values.dim() == _OF_VECTORS else values
            for name, values in batch.fields.items()
        }
        batch = dataclasses.replace(batch, fields=fields)
        loss = self.own.spec.loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.dim() or (training and not loss.requires_grad):
            raise InvalidInput(
                f"the loss of {self.own.config.model.named} must be a scalar tensor that has a gradient."
            )
        if training and loss.dtype == torch.float16:
            raise InvalidInput(
                f"the loss of {self.own.config.model.named} is float16, in which a loss times the loss scale "
                "overflows: compute it in float32, as (losses.float() * microbatch.weights).sum()."
            )
        return loss

    def prove(self, batch: Microbatch, loss: Tensor) -> None:
        """Check that `loss` is linear in the weights of predictions, and that the model does not change its buffers.

        The check runs once per round, after the first backward pass with a finite loss. Each prediction has a weight in
        the loss. If the loss is linear in these weights, it equals the sum of each weight times the gradient of the
        loss with respect to that weight (Euler's theorem).

        Raises:
            InvalidInput: When the check fails.
        """
        if self.proved:
            return
        name, weights = self.own.config.model.named, batch.weights.detach()
        value, gradient = float(loss), batch.weights.grad
        self.proved = math.isfinite(value)
        weighted_gradient = None if gradient is None else float((weights * gradient).sum())
        if math.isfinite(value) and (
            weighted_gradient is None or not math.isclose(value, weighted_gradient, rel_tol=SAME, abs_tol=1e-6)
        ):
            raise InvalidInput(
                f"the loss of {name} must be the sum of each prediction's loss times its weight, so that it "
                "does not depend on the number of workers. Multiply by microbatch.weights, add up, and do "
                "not divide."
            )
        if self._versions != self._buffer_versions():
            raise InvalidInput(
                f"the model of {name} writes into its buffers, which would then differ between workers. Use "
                "norms without running statistics (LayerNorm, GroupNorm)."
            )
        for proof in self.proofs:
            proof()

    def _buffer_versions(self) -> list[int]:
        return [buffer._version for buffer in self.model.buffers()]

    def _noise(self, batch: Microbatch) -> int:
        """Return the seed of the random numbers that a microbatch's computation draws (dropout).

        The seed depends only on the run's seed and on the first sample of the microbatch, not on the rank.
        """
        name = f"{self.own.config.seed}/{batch.samples[:1]}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")


def preload() -> None:
    """Import the job's custom model in the parent process that workers are forked from.

    An import error is ignored here, because the worker also imports the model, and reports the error.
    """
    model = json.loads(os.environ.get("CONCERTINA_TRAINER") or "{}").get("model", {})
    if entrypoint := model.get("entrypoint") or (HF_ENTRYPOINT if model.get("hf") else None):
        with contextlib.suppress(InvalidInput):
            loaded(entrypoint)
