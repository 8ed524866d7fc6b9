"""Description of a custom model for planning: its size, and what its loss computes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from concertina_data.data_manifest import Field
from concertina_data.opening import open_place, read_manifest
from concertina_data.places import CacheSettings
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import StorageError
from concertina_trainer.config.memory_config import Activations
from concertina_trainer.config.trainer import Precision, TrainerConfig
from concertina_trainer.data.elements import empty_rows
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.model.flops import orthogonalization_flops
from concertina_trainer.model.optimizer import is_matrix
from concertina_trainer.model.own import OwnModel, OwnSpec, loaded, said, widths
from concertina_trainer.model.spec import DataShape
from concertina_trainer.model.stages import Stages
from concertina_trainer.parallel.shard import compute_dtype
from concertina_trainer.planning.description import Description
from concertina_trainer.planning.fake import fake_tensors

HERE = (
    "`concertina plan` runs it, so install its package, add its folder to PYTHONPATH, or plan in its image "
    "(--python 'docker run --rm -i --entrypoint python3 IMAGE')"
)
NO_VALUES = "so the loss must not read values (.item(), .tolist(), if)"
PATIENCE_SECONDS = 20.0
"""Seconds to wait for a data store that does not respond.

The value is small, because a person waits for the plan.
"""


@dataclasses.dataclass(frozen=True)
class DataDescription:
    """Properties of the training data that a custom model must accept."""

    vocab_size: int
    """Upper bound (exclusive) of token ids, or 0 if the data have no token ids."""
    fields: tuple[Field, ...] = ()
    """Fields other than the token and its weight."""

    def shape(self, config: TrainerConfig) -> DataShape:
        return DataShape(config.model.sequence_length, self.vocab_size, widths(self.fields))


def data_of(config: TrainerConfig) -> DataDescription:
    """Return the description of the job's data, from the manifests of the data sets.

    Raises:
        InvalidInput: When the manifests can't be read on this machine.
    """
    try:
        manifests = [
            read_manifest(open_place(source.uri, CacheSettings(0, PATIENCE_SECONDS))) for source in config.data.sources
        ]
    except (InvalidInput, StorageError, OSError, ImportError) as error:
        raise InvalidInput(
            f"the data can't be read here, and {config.model.named} needs their description to build "
            f"the model: {error} Or give --vocab-size, and --field for each other field."
        ) from error
    return DataDescription(max(manifest.vocab_size for manifest in manifests), manifests[0].more_fields)


def as_on_gpus(config: TrainerConfig) -> TrainerConfig:
    """Return the configuration with the precision that Auto means on a GPU, which is BFloat16."""
    if config.precision is not Precision.auto:
        return config
    return config.model_copy(update={"precision": Precision.bfloat16})


def microbatch(config: TrainerConfig, rows: int, data: DataDescription | None = None) -> Microbatch:
    """Return a microbatch of zeros with `rows` sequences.

    `data` describes the data of a custom model, and is None for the decoder.
    """
    length = config.model.sequence_length
    tokens, weights = torch.zeros(rows, length + 1, dtype=torch.int64), torch.zeros(rows, length)
    if data is None:
        return Microbatch(tokens, weights, None)
    ids = None
    if config.data.separates_documents:
        ids = torch.zeros(rows, length, dtype=torch.int32)
    fields = {name: torch.from_numpy(values) for name, values in empty_rows(data.fields, rows, length + 1).items()}
    return Microbatch(tokens, weights, ids, tuple(range(rows)), fields)


@contextlib.contextmanager
def running(own: OwnSpec | None) -> Iterator[None]:
    """Context manager that runs code of a custom model under fake tensors.

    Raises:
        InvalidInput: When a custom model can't run under fake tensors.
    """
    try:
        yield
    except InvalidInput:
        raise
    except Exception as error:
        if own is None:
            raise
        reads = "and transformers reads values to compute this model" if own.config.model.hf else NO_VALUES
        raise InvalidInput(
            f"the loss of {own.config.model.named} can't be planned, because it raised {said(error)}. "
            f"Planning computes the loss with tensors that have shapes but no values, {reads}."
        ) from error


def described(config: TrainerConfig, data: DataDescription) -> Description:
    """Return the description of a custom model: its weights, blocks, and operations.

    Raises:
        InvalidInput: When the model can't be built, or can't run under fake tensors.
    """
    loaded(str(config.model.custom), HERE)  # tensors that it makes at import stay real
    config = as_on_gpus(config)
    own = OwnSpec(config, data.shape(config))
    own.blocks(own.module())  # checks that there are blocks if activations are recomputed
    declared_flops = own.flops()
    keeping = config.model_copy(update={"memory": config.memory.model_copy(update={"activations": Activations.keep})})
    dtype = compute_dtype(config.precision, torch.device("cpu"))
    batch_rows, operations = min(config.resolved_micro_batch_size, config.global_batch_size), Operations()
    with fake_tensors(own), running(own):
        model = OwnModel(OwnSpec(keeping, own.data), dtype)
        _computed_in(model, dtype)
        batch = microbatch(config, batch_rows, data)
        with operations:
            model(batch).backward()
    elements, matrices = batch_rows * config.model.sequence_length, _matrices(Stages((), model))
    return Description(
        weights=model.weights,
        trained=_count(model, trained=True),
        blocks=len(model.blocks),
        in_blocks=sum(map(_count, model.blocks.values())),
        matrices=sum(matrix.numel() for matrix in matrices),
        orthogonalized=sum(
            orthogonalization_flops(*matrix.shape[-2:]) * math.prod(matrix.shape[:-2]) for matrix in matrices
        ),
        flops=operations.flops / elements if declared_flops is None else declared_flops,
        counted=declared_flops is None,
        moved=operations.moved / elements,
    )


def _count(module: nn.Module, trained: bool = False) -> int:
    """Return the number of the module's weights. With `trained`, count only trained weights."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad or not trained)


def _matrices(model: Stages) -> list[Tensor]:
    """Return the trained parameters that Muon updates."""
    blocks, embeddings = model.blocks(), model.embeddings()
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return [parameter for name, parameter in trained if is_matrix(name, parameter.dim(), blocks, embeddings)]


def _computed_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the parameters by uninitialized ones in `dtype`, the dtype in which FSDP gathers parameters.

    Module.to can't cast a module under fake tensors. A parameter that several modules share stays one parameter.
    """
    cpu = torch.device("cpu")
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in cast:
                empty = torch.empty(parameter.shape, dtype=dtype, device=cpu)
                cast[parameter] = nn.Parameter(empty, parameter.requires_grad)
            setattr(module, name, cast[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=cpu))


class Operations(TorchDispatchMode):
    """Counter of the operations that run while this mode is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        """Floating-point operations of matrix products, convolutions and attention."""
        self.moved = 0
        """Bytes read and written by all operations that `flops` does not count."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (counted := flop_registry.get(func.overloadpacket)) is not None:
            self.flops += counted(*args, **kwargs, out_val=result)
            return result
        read, written = (
            [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in ((args, kwargs), result)
        )
        read_storages = {tensor.untyped_storage()._cdata for tensor in read}
        if func._schema.is_mutable or any(tensor.untyped_storage()._cdata not in read_storages for tensor in written):
            self.moved += sum(math.prod(tensor.shape) * tensor.itemsize for tensor in (*read, *written))
        return result
