"""Cost of laying out a model, which each round pays again, and the arrays of its state."""

from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.model.optimizer import LocalOptimizer
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.parallelize import parallelized
from concertina_trainer.planning.fake import fake_rank
from concertina_trainer.state import train_state
from concertina_trainer.state.train_state import TrainState


def config(**model: object) -> TrainerConfig:
    small = {"layers": 1, "dim": 32, "heads": 2, "sequenceLength": 32, **model}
    return TrainerConfig.model_validate({"data": {"uri": "/none"}, "model": small})


@pytest.mark.parametrize("parallelism", [ParallelismConfig(), ParallelismConfig(shard=1), ParallelismConfig(tensor=2)])
def test_memory_is_allocated_without_deriving_how_it_is_cut(parallelism: ParallelismConfig) -> None:
    derived = []
    propagate = ShardingPropagator.propagate_op_sharding_non_cached

    def watched(propagator: ShardingPropagator, schema: object) -> object:
        derived.append(str(schema.op))  # type: ignore[attr-defined]
        return propagate(propagator, schema)

    with fake_rank(1, 4, parallelism, False) as world:
        with mock.patch.object(ShardingPropagator, "propagate_op_sharding_non_cached", watched):
            model = parallelized(config(), world)
        assert "aten.detach.default" in derived, "FSDP wraps each parameter"
        assert "aten.empty_like.default" not in derived
        for _, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.requires_grad
            assert parameter.to_local().device.type == "cpu"
            like = torch.empty_like(parameter)
            assert (like.shape, like.placements) == (parameter.shape, parameter.placements)
            assert like.to_local().shape == parameter.to_local().shape


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
