"""Restored loaders continue with the same order, in this pass and in later ones."""

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader

import trainingjob.accelerate
from trainingjob import _values
from trainingjob._order import order_of


@pytest.mark.parametrize("own", [True, False])
def test_later_passes_have_the_order_of_one_that_was_not_stopped(own):
    """The sampler's generator may be the loader's, which draws a seed from it at each pass."""

    def passes(place=None):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1) if own else None
        loader = DataLoader(range(8), 2, shuffle=True, generator=generator)
        order, found = order_of(loader), []
        if place is not None:
            order.resume(_values.decode(place), 4)
        for _ in range(3):
            found.append([])
            for batch in loader:
                found[-1].append(batch.tolist())
                if len(found) == 1 and len(found[0]) == 2:
                    place = place or _values.encode(order.began, "order")
        return found, place

    whole, place = passes()
    again, _ = passes(place)
    assert again == [whole[0][2:], *whole[1:]]


@pytest.fixture
def accelerator():
    yield accelerate.Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def prepared(accelerator, folder):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(torch.arange(10.0).reshape(-1, 1), 1, shuffle=True)
    accelerator._models.clear()
    accelerator._dataloaders.clear()
    model, loader = accelerator.prepare(model, loader)
    return trainingjob.accelerate.register(accelerator, folder=str(folder)), loader


def test_a_pass_that_was_left_is_over_and_one_that_was_saved_goes_on(accelerator, tmp_path):
    state, loader = prepared(accelerator, tmp_path)
    state.restore()
    passes = []
    for step in range(2):
        passes.append([])
        for batch in state.batches(loader):
            passes[-1].append(int(batch))
            if len(passes[-1]) == 7:
                state.commit(step, durable=True)
                break
    assert [len(set(each)) for each in passes] == [7, 7]

    del state  # its process ends
    state, loader = prepared(accelerator, tmp_path)
    assert state.restore() == 2
    rest = [int(batch) for batch in state.batches(loader)]
    assert sorted(passes[1] + rest) == list(range(10))
    assert len(list(state.batches(loader))) == 10
