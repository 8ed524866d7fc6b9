"""Training state of a rank (weights and optimizer moments), and the functions that restore it.

Each tensor is a named box (rectangular part) of a global tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import TensorMeta

from concertina_state.errors import InvalidInput
from concertina_state.filling import ShardReader
from concertina_state.format.read_plan import ReadPlan, reads
from concertina_state.format.shardfile import FrozenWeights, Header, Layout
from concertina_state.holdings import RemoteArray
from concertina_state.state_index import StateIndex
from concertina_trainer.config.model_config import BLOCK, FrozenDtype, ModelConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.format.adapters import is_adapter
from concertina_trainer.format.hf_names import MODEL
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.initial import initial_value
from concertina_trainer.model.lora import set_frozen_dtype
from concertina_trainer.model.optimizer import LocalOptimizer, check_groups, local
from concertina_trainer.model.own import OwnModel
from concertina_trainer.model.quantized import CODES, SCALES, quantized
from concertina_trainer.model.stages import Stages
from concertina_trainer.parallel.group import DistContext

_QUANTIZED = (f".{CODES}", f".{SCALES}")
_INSTEAD = "restore the model's configuration, or start a new run under another checkpoint.uri"


class TrainState:
    """Weights and optimizer moments of this rank, which are copied into snapshots.

    A snapshot is a copy of the training state in node memory.
    """

    def __init__(
        self,
        model: Stages,
        config: TrainerConfig,
        optimizer: LocalOptimizer,
        world: DistContext,
        frozen: FrozenWeights | None = None,
    ) -> None:
        """Record the tensors of this rank. If `frozen` is not None, the frozen weights are not a part of the state."""
        self._optimizer, self._own = optimizer, model.own
        moments = optimizer.moments()
        tensors: dict[str, Tensor | RemoteArray] = {}
        parameters, buffers = _arrays(model) if model.own else _arrays_of_decoder(config.model.model_dump_json())
        check_groups(config.optimizer, [name for name, (_, is_trained) in parameters.items() if is_trained])
        for name, (array, is_trained) in parameters.items():
            tensors[f"{MODEL}{name}"] = array
            for kind, dtype in optimizer.kinds(name, len(array.shape)).items() if is_trained else ():
                tensors[f"optimizer.{kind}.{name}"] = RemoteArray(array.shape, dtype)
        tensors |= {f"{MODEL}{name}": array for name, array in buffers.items()}
        tensors |= {f"{MODEL}{name}": _of_stage(buffer, world) for name, buffer in model.named_buffers()}
        self._originals = _originals(model)
        tensors |= {name: original.values for name, original in self._originals.items()}
        for name, parameter in model.named_parameters():
            if name.endswith(_QUANTIZED):
                continue
            tensors[f"{MODEL}{name}"] = parameter.detach()
            part = local(parameter.detach())
            for kind, dtype in optimizer.kinds(name, parameter.dim()).items() if parameter.requires_grad else ():
                # A rank without a part of the parameter has no moments. The empty part of the parameter takes their
                # place.
                moment = moments[kind][name] if part.numel() else part.to(dtype)
                tensors[f"optimizer.{kind}.{name}"] = _cut_like(parameter, moment)
        elsewhere = {f"{MODEL}{name}" for name, (_, is_trained) in parameters.items() if not is_trained and frozen}
        self._catalogue = StateIndex(
            {name: tensor for name, tensor in tensors.items() if name not in elsewhere},
            {}, world.rank, world.size, whole_cut=world.cut,
        )  # fmt: skip
        self._index = functools.partial(StateIndex, own={}, rank=world.rank, world=world.size, whole_cut=world.cut)
        self.frozen = self._index({name: tensors[name] for name in elsewhere})
        """Frozen weights that are not saved with the state, or empty if the state contains all weights.

        Until `quantize` is called, this index contains the original values of weights to be quantized, in host memory.
        """
        self._frozen_as_read = {name: tensors[name] for name in elsewhere - self._originals.keys()}
        self._quantized = [local(part.detach()) for of_layer in self._originals.values() for part in of_layer[1:]]
        self.names = {local_array.name for index in (self._catalogue, self.frozen) for local_array in index.held}
        """Names of all weights, buffers and moments of the model, including those on other ranks."""
        self.saved = self._catalogue.saved
        """Tensors that this rank saves, and their layout.

        `saved.layout` also contains the configuration. A later restore compares this configuration with its own.
        """
        self.saved.layout = Layout(self.saved.layout.chunks, config.model_dump_json(by_alias=True))
        self.digest = self._catalogue.digest

    @property
    def own(self) -> OwnModel | None:
        """The custom model, or None for the bundled decoder."""
        return self._own

    @torch.no_grad()
    def initialise(self, config: TrainerConfig) -> None:
        """Set the state of step 0.

        The weights depend only on the seed, the averages equal the weights, and the moments are 0.
        """
        initial = functools.partial(initial_value, config=config.model, seed=config.seed)
        for local_array in self._catalogue.held:
            if not local_array.name.startswith(MODEL):
                local_array.local.zero_()
            elif local_array.local.numel():
                name = local_array.name.removeprefix(MODEL)
                local_array.local.copy_(
                    (self._own.initial if self._own else initial)(name, local_array.whole, local_array.box)
                )
        self._optimizer.set_step(0)
        self._optimizer.begin_averages()

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors of this rank that training needs: the tensors that the rank saves, and its frozen weights."""
        return [*self.saved.tensors, *(array.local for array in self.frozen.held), *self._quantized]

    @torch.no_grad()
    def quantize(self, dtype: FrozenDtype) -> Collection[str]:
        """Quantize frozen weights: compute their codes, and free their original values.

        Return the names of these weights. Call this method after the frozen weights were read and their digest was
        checked.
        """
        names = list(self._originals)
        for original in self._originals.values():
            codes, scales = quantized(local(original.values).to(original.codes.device), dtype)
            local(original.codes.detach()).copy_(codes)
            local(original.scales.detach()).copy_(scales)
        self._originals = {}
        self.frozen = self._index(self._frozen_as_read)
        return names

    def plan(self, headers: Mapping[int, Header]) -> ReadPlan:
        """Plan which bytes of a saved state this rank reads. Any number of ranks may have written the state.

        `headers` contains the header of each shard of the saved state, keyed by the shard's number.

        Raises:
            InvalidInput: When the saved state lacks tensors of this model.
        """
        own_names = self.names
        for header in headers.values():
            foreign = next((name for name in header.chunks if name not in own_names), None)
            if foreign is not None:
                raise InvalidInput(f"the saved state contains {foreign}, which this model does not have: {_INSTEAD}.")
        return self._catalogue.plan(headers, _INSTEAD)

    def load(self, plan: ReadPlan, shards: Mapping[int, ShardReader], step: int) -> None:
        """Read all tensors of a plan from the shards. `step` is the number of finished steps of the saved state."""
        self._catalogue.fill(plan, shards)
        self._optimizer.set_step(step)

    def load_weights(self, shards: Sequence[ShardReader], whence: str) -> None:
        """Fill the weights from `shards`, in which they may have another dtype.

        The averages of the weights are set to the new weights. Optimizer moments are not changed. `whence` names the
        source of the shards in error messages.

        Raises:
            InvalidInput: When the shards do not contain the weights of this model.
        """
        indexes = (self._catalogue, self.frozen)
        own_names = self.names
        headers = {number: shard.header for number, shard in enumerate(shards)}
        stored_names = {name for header in headers.values() for name in header.chunks}
        # If the saved weights were trained without adapters, this run's adapters keep their initial values.
        weights = [
            [
                chunk
                for chunk, _ in index.wanted().values()
                if chunk.name.startswith(MODEL) and (chunk.name in stored_names or not is_adapter(chunk.name))
            ]
            for index in indexes
        ]
        for header in headers.values():
            for name, stored in header.chunks.items():
                if name.startswith(MODEL) and name not in own_names:
                    raise InvalidInput(
                        f"{whence} contains {name.removeprefix(MODEL)} {list(stored.chunk.global_shape)}, "
                        "which this model does not have: correct spec.trainer.model, or use other initial "
                        "weights."
                    )
            for chunk in itertools.chain.from_iterable(weights):
                saved = header.chunks.get(chunk.name)
                if saved and saved.chunk.global_shape != chunk.global_shape:
                    raise InvalidInput(
                        f"{chunk.name.removeprefix(MODEL)} is {list(saved.chunk.global_shape)} in {whence} "
                        f"and {list(chunk.global_shape)} in this model: correct spec.trainer.model, or use "
                        "other initial weights."
                    )
        for index, chunks in zip(indexes, weights, strict=True):
            plan = reads(headers, chunks)
            plan.require(whence)
            index.fill(plan, dict(enumerate(shards)))
        self._optimizer.begin_averages()


class _WholeArrays(NamedTuple):
    """Arrays of a whole model, by name."""

    parameters: Mapping[str, tuple[RemoteArray, bool]]
    """Each parameter, with True if the parameter is trained."""
    buffers: Mapping[str, RemoteArray]


class _Original(NamedTuple):
    """Frozen weight of a layer before it is quantized, and the layer's parameters for the result."""

    values: DTensor
    """bfloat16 `[rows, columns]` in host memory, divided among ranks like the codes."""
    codes: DTensor
    scales: DTensor


def _originals(model: Stages) -> dict[str, _Original]:
    """Allocate memory for the original values of all weights to be quantized. Return it, keyed by the weight's name."""
    originals = {}
    parameters = dict(model.named_parameters())
    for name, codes in parameters.items():
        layer, _, end = name.rpartition(".")
        if end != CODES:
            continue
        scales = parameters[f"{layer}.{SCALES}"]
        assert isinstance(codes, DTensor)
        assert isinstance(scales, DTensor)
        shapes = [torch.Size((part.size(0), part.size(1) * BLOCK)) for part in (scales, local(scales.detach()))]
        meta = TensorMeta(shapes[0], (shapes[0][1], 1), torch.bfloat16)
        spec = dataclasses.replace(scales._spec, tensor_meta=meta)
        values = DTensor(torch.empty(shapes[1], dtype=torch.bfloat16), spec, requires_grad=False)
        originals[f"{MODEL}{layer}.weight"] = _Original(values, codes, scales)
    return originals


def _arrays(model: Stages | Decoder) -> _WholeArrays:
    def array(tensor: Tensor) -> RemoteArray:
        return RemoteArray(tensor.shape, tensor.dtype)

    return _WholeArrays(
        {name: (array(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()},
        {name: array(buffer) for name, buffer in model.named_buffers()},
    )


@functools.lru_cache(maxsize=1)
def _arrays_of_decoder(config: str) -> _WholeArrays:
    """Return the arrays of the whole decoder, from a ModelConfig as JSON.

    The result is cached, because each round of a process needs it again.
    """
    model = ModelConfig.model_validate_json(config)
    with torch.device("meta"):
        decoder = Decoder(model)
    if model.lora:
        set_frozen_dtype(decoder, model.lora.frozen_dtype)
    return _arrays(decoder)


def _of_stage(buffer: Tensor, world: DistContext) -> Tensor:
    """Return a model's buffer in the form in which it is saved.

    Every rank has the buffer, unless there are pipeline stages. With pipeline stages, only the ranks of one stage have
    the buffer, and the result is a DTensor, which records these ranks.
    """
    if world.meshes.pipeline is None:
        return buffer
    mesh = world.meshes.fsdp
    return DTensor.from_local(buffer, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _cut_like(parameter: Tensor, moment: Tensor) -> Tensor:
    """Return this rank's part of an optimizer moment as a DTensor, divided in the same way as `parameter`."""
    if not isinstance(parameter, DTensor):
        return moment
    spec = parameter._spec
    if spec.tensor_meta is not None and spec.tensor_meta.dtype != moment.dtype:
        spec = dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=moment.dtype))
    # DTensor.from_local would copy tensors in host memory to the mesh's device.
    return DTensor(moment, spec, requires_grad=False)
