"""Cost of laying out a model, which each round pays again, and the arrays of its state."""

from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.model.optimizer import LocalOptimizer
from concertina_trainer.parallel import detached
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.parallelize import parallelized
from concertina_trainer.planning.fake import fake_rank
from concertina_trainer.state import train_state
from concertina_trainer.state.train_state import TrainState


def config(**model: object) -> TrainerConfig:
    small = {"layers": 1, "dim": 32, "heads": 2, "sequenceLength": 32, **model}
    return TrainerConfig.model_validate({"data": {"uri": "/none"}, "model": small})


@pytest.mark.parametrize("parallelism", [ParallelismConfig(), ParallelismConfig(shard=1), ParallelismConfig(tensor=2)])
def test_a_model_is_laid_out_without_deriving_how_copies_are_cut(parallelism: ParallelismConfig) -> None:
    derived = []
    propagate = ShardingPropagator.propagate_op_sharding_non_cached

    def watched(propagator: ShardingPropagator, schema: object) -> object:
        derived.append(str(schema.op))  # type: ignore[attr-defined]
        return propagate(propagator, schema)

    with fake_rank(1, 4, parallelism, False) as world:
        with mock.patch.object(ShardingPropagator, "propagate_op_sharding_non_cached", watched):
            model = parallelized(config(), world)
        assert derived == []
        for _, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.requires_grad
            assert parameter.to_local().device.type == "cpu"
            like = torch.empty_like(parameter)
            assert (like.shape, like.placements) == (parameter.shape, parameter.placements)
            assert like.to_local().shape == parameter.to_local().shape


PLACEMENTS = (
    [Shard(0), Replicate()], [Shard(1), Shard(0)], [_StridedShard(0, split_factor=2), Shard(0)],
    [Replicate(), Partial()],
)  # fmt: skip


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_detached_tensor_is_the_one_that_torch_makes(placements: list[Placement], contiguous: bool) -> None:
    with fake_rank(1, 4, ParallelismConfig(), False), mock.patch.dict(DTensor._op_dispatcher._custom_op_handlers):
        handlers = DTensor._op_dispatcher._custom_op_handlers
        handlers.pop(torch.ops.aten.detach.default, None)
        mesh = init_device_mesh("cpu", (2, 2))
        local = torch.arange(12.0).reshape(3, 4)
        source = DTensor.from_local(
            local if contiguous else local.t(), mesh, placements, run_check=False
        ).requires_grad_()  # fmt: skip
        expected = source.detach()
        detached.skip_propagation()
        with mock.patch.object(ShardingPropagator, "propagate_op_sharding_non_cached", side_effect=AssertionError):
            found = source.detach()
        assert found._spec == expected._spec
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert (found.requires_grad, found.is_leaf) == (expected.requires_grad, expected.is_leaf) == (False, True)
        assert found.to_local().data_ptr() == expected.to_local().data_ptr() == source.to_local().data_ptr()


def test_a_torch_without_the_table_of_handlers_detaches_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DTensor, "_op_dispatcher", object())
    detached.skip_propagation()


def test_a_later_round_has_the_arrays_of_its_own_model() -> None:
    """The arrays of other stages are known from the whole model, which is kept from round to round."""

    def digest(world: DistContext, dim: int) -> str:
        job = config(dim=dim, layers=2)
        model = parallelized(job, world)
        return TrainState(model, job, LocalOptimizer(model, job.optimizer, 0), world).digest

    with fake_rank(0, 2, ParallelismConfig(pipeline=2), False) as world:
        alone = {}
        for dim in (32, 64):
            train_state._arrays_of_decoder.cache_clear()
            alone[dim] = digest(world, dim)
        assert [digest(world, dim) for dim in (32, 32, 64, 32)] == [alone[dim] for dim in (32, 32, 64, 32)]
