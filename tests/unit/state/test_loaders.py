"""`State.batches`: a pass over a DataLoader continues where its state was saved."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from concertina_state.errors import InvalidInput
from trainingjob._loaders import Loaders
from trainingjob._values import decode, encode


def loader(replicas=None, rank=0, items=24, batch=2):
    torch.manual_seed(1)
    data = list(range(items))
    if replicas is None:
        return DataLoader(data, batch, shuffle=True)
    return DataLoader(data, batch, sampler=DistributedSampler(data, replicas, rank))


def epochs(loaders, of, first=0, end=3, stop_after=None):
    """Return the batches of each epoch, and the state after `stop_after` batches of the last one if it stops there."""
    passes = []
    for epoch in range(first, end):
        if isinstance(of.sampler, DistributedSampler):
            of.sampler.set_epoch(epoch)
        passes.append([])
        for batch in loaders.batches(of):
            passes[-1].append(batch.tolist())
            if epoch == end - 1 and len(passes[-1]) == stop_after:
                return passes, encode(loaders.state_dict(), "loaders")
    return passes, None


def again(saved):
    loaders = Loaders()
    loaders.load_state_dict(decode(saved))
    loaders.remember_random_numbers()
    return loaders


@pytest.mark.parametrize("replicas", [None, 2])
def test_a_pass_goes_on_in_the_same_order(replicas):
    whole, _ = epochs(Loaders(), loader(replicas), end=4)
    first, saved = epochs(Loaders(), loader(replicas), end=2, stop_after=4)
    continued, _ = epochs(again(saved), loader(replicas), first=1, end=4)
    assert first == [whole[0], whole[1][:4]]
    assert continued[0] == whole[1][4:]
    if replicas:  # Otherwise later orders are drawn from random numbers, which State restores.
        assert continued[1:] == whole[2:]


def test_a_script_may_count_a_pass_before_its_last_commit():
    whole, _ = epochs(Loaders(), loader(2), end=2)
    _, saved = epochs(Loaders(), loader(2), end=1, stop_after=len(whole[0]))
    continued, _ = epochs(again(saved), loader(2), first=1, end=2)
    assert continued == whole[1:]


def test_a_new_pass_draws_as_in_an_uninterrupted_run():
    given = loader()
    loaders = Loaders()
    epochs(loaders, given, end=1)
    saved, random = encode(loaders.state_dict(), "loaders"), torch.get_rng_state()
    next(loaders.batches(given))
    drawn = torch.rand(3)
    given = loader()
    torch.set_rng_state(random)
    next(again(saved).batches(given))
    assert torch.equal(torch.rand(3), drawn)


def test_ranks_of_another_world_go_on_behind_what_was_consumed():
    saved, consumed = [], []
    for rank in range(3):
        passes, state = epochs(Loaders(), loader(3, rank), end=1, stop_after=2)
        consumed += [item for batch in passes[0] for item in batch]
        saved.append(state)
    for rank in range(2):
        passes, _ = epochs(again(saved[rank]), loader(2, rank), end=1)
        consumed += [item for batch in passes[0] for item in batch]
    assert sorted(consumed) == list(range(24))


def test_what_the_ranks_of_another_world_can_not_share_evenly_is_said(capfd):
    _, saved = epochs(Loaders(), loader(3, 0, batch=1), end=1, stop_after=1)
    passes, _ = epochs(again(saved), loader(2, 0, batch=1), end=1)
    assert len(passes[0]) == 11
    assert (
        "loader 0: 1 items of this pass are consumed again, as 3 can't be shared by 2 ranks" in capfd.readouterr().err
    )


def test_a_pass_that_was_left_is_over():
    loaders, of = Loaders(), loader()
    next(iter(loaders.batches(of)))
    for _ in loaders.batches(of):
        break
    assert loaders.state_dict()["passes"][0]["items"] == 0


def test_a_script_that_begins_at_another_epoch_is_refused():
    _, saved = epochs(Loaders(), loader(2), end=3, stop_after=4)
    with pytest.raises(InvalidInput, match=r"the sampler of loader 0 is at epoch 0, and the saved state at epoch 2"):
        epochs(again(saved), loader(2), end=1)


def test_other_data_are_refused():
    _, saved = epochs(Loaders(), loader(), end=1, stop_after=4)
    with pytest.raises(InvalidInput, match=r"loader 0 of State.batches\(\) has 23 items, but had 24 when it was saved"):
        again(saved).batches(loader(items=23))


def test_a_loader_without_a_sampler_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    with pytest.raises(InvalidInput, match=r"whose order is not known.*torchdata.StatefulDataLoader"):
        Loaders().batches(DataLoader(Stream()))


def test_restore_comes_before_the_first_batches():
    loaders = Loaders()
    loaders.batches(loader())
    with pytest.raises(InvalidInput, match=r"restore\(\) must be called before the first State.batches\(\)"):
        loaders.load_state_dict({"passes": []})
