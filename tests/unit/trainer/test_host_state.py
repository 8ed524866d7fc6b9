"""Location of tensors when the state is in host memory and the device is a GPU.

The process group is fake, with meshes on cuda. There is no GPU, so tensors on it hold nothing. Pinning makes a copy, as
on a GPU.
"""

import types

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeStore
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.overrides import TorchFunctionMode

from concertina_state.state_index import _buckets
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.model.optimizer import LocalOptimizer, local
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.parallelize import parallelized
from concertina_trainer.state.train_state import TrainState

EXPERTS = {"count": 4, "hiddenDim": 24, "biasRate": 0.01}
MODEL = {
    "layers": 2, "dim": 32, "heads": 4, "kvHeads": 2, "vocabSize": 37, "sequenceLength": 32, "experts": EXPERTS,
}  # fmt: skip
LAYOUTS = {
    "fsdp": (3, {}),
    "some without rows": (7, {}),
    "hsdp x tensor": (8, {"tensor": 2, "shard": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "experts": (4, {"expert": 2, "shard": 2}),
}


class NoGpu(TorchFunctionMode):
    """Mode in which tensors on cuda are on meta."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args = tuple(_elsewhere(each) for each in args)
        return func(*args, **{name: _elsewhere(each) for name, each in (kwargs or {}).items()})


def _elsewhere(given):
    on_gpu = str(given).startswith("cuda") if isinstance(given, str | torch.device) else False
    return torch.device("meta") if on_gpu else given


@pytest.fixture
def pinned(monkeypatch):
    """Make pinning a copy, and return the addresses of the storages that were pinned."""
    known = set()

    def pin(tensor):
        copy = tensor.clone()
        known.add(copy.untyped_storage().data_ptr())
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.untyped_storage().data_ptr() in known)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with NoGpu():
        yield known


@pytest.fixture(params=LAYOUTS)
def world(request):
    """Yield the context of the last rank of a world."""
    size, parallelism = LAYOUTS[request.param]
    dist.init_process_group("fake", store=FakeStore(), rank=size - 1, world_size=size)
    _clear_sharding_prop_cache()  # The cache contains equal meshes of another rank.
    yield DistContext.of(
        size - 1, size, torch.device("cuda"), ParallelismConfig.model_validate(parallelism), routed=True
    )
    dist.destroy_process_group()


def test_what_is_saved_is_the_memory_that_fsdp_reads_and_the_optimizer_writes(world, pinned):
    config = TrainerConfig.model_validate({"data": {"uri": "/none"}, "model": MODEL, "memory": {"offload": "State"}})
    model = parallelized(config, world)
    optimizer = LocalOptimizer(model, config.optimizer, 0)
    state = TrainState(model, config, optimizer, world)
    state.initialise(config)
    saved = {each.name: each.local for each in state._catalogue.held}
    moments = optimizer.moments()
    read = list(_read_by_fsdp(model))
    assert read
    for name, mine in read:
        assert mine.untyped_storage().data_ptr() in pinned
        assert saved[f"model.{name}"].data_ptr() == mine.data_ptr() == optimizer._local[name].data_ptr()
        for kind, of_kind in moments.items():
            assert saved[f"optimizer.{kind}.{name}"].data_ptr() == of_kind[name].data_ptr()
            assert of_kind[name].device.type == "cpu"
    assert {name for name, _ in read} == optimizer._local.keys()
    assert all(buffer.is_meta for _, buffer in model.named_buffers()), "they are computed with on the device"


def _read_by_fsdp(model):
    """Yield name and part of each parameter of which the rank has a part, after FSDP's first step."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
            group._validate_cpu_offload_params()
            for each in group.fsdp_params:
                each.reset_sharded_param()
                mine = local(each.sharded_param.detach())
                assert each._sharded_param_data.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()
                if mine.numel():
                    yield names[id(each.sharded_param)], mine


@pytest.mark.parametrize(("sends", "pieces"), [("meta", [5]), ("cuda", [1, 2, 1, 1])])
def test_what_the_group_does_not_send_from_goes_by_the_device_in_pieces(sends, pieces):
    """The tensors have 40 MiB."""
    parts = [torch.empty(10 << 20, device="meta") for _ in range(5)]
    buckets = list(_buckets(parts, types.SimpleNamespace(_device_types=[torch.device(sends)])))
    assert [len(some) for _, some in buckets] == pieces
    assert all(device.type == sends for device, _ in buckets)
    assert [id(part) for _, some in buckets for part in some] == [id(part) for part in parts]
