"""Commits of a script at which its state can be saved without losing gradients."""

import pytest
import torch

from trainingjob._save_points import SavePoints, innermost


def trained(width=3, **options):
    model = torch.nn.Linear(width, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, **options)


def backward(model):
    model(torch.rand(2, model.in_features)).sum().backward()


@pytest.fixture
def points():
    return SavePoints()


def saves(points):
    return points.pass_commit() and not points.has_pending_gradients()


def test_without_an_optimizer_each_commit_is_one(points):
    assert [saves(points) for _ in range(3)] == [True] * 3


def test_only_commits_after_an_optimizer_step_are(points):
    model, optimizer = trained()
    points.watch([optimizer])
    saved = []
    for batch in range(8):
        backward(model)
        if batch % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        saved.append(saves(points))
    assert saved == [False, False, False, True] * 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_were_dropped_do_not_wait(points, set_to_none):
    model, optimizer = trained()
    points.watch([optimizer])
    for _ in range(3):
        backward(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert saves(points)


def test_gradients_computed_after_the_step_wait(points):
    """The loop computes the next gradients before it commits."""
    model, optimizer = trained()
    points.watch([optimizer])
    backward(model)
    optimizer.step()
    backward(model)
    assert not saves(points)
    optimizer.step()
    assert saves(points)


def test_an_optimizer_that_accumulates_keeps_another_ones_steps_from_being_saved(points):
    one, each = trained()
    other, rarely = trained()
    points.watch([each, rarely])
    saved = []
    for batch in range(6):
        backward(one)
        backward(other)
        each.step()
        each.zero_grad()
        if batch % 3 == 2:
            rarely.step()
            rarely.zero_grad()
        saved.append(saves(points))
    assert saved == [False, False, True] * 2


def test_what_a_generator_leaves_in_its_discriminator_does_not_wait(points):
    generator, of_generator = trained(3)
    discriminator, of_discriminator = trained(1)
    points.watch([of_generator, of_discriminator])
    for _ in range(3):
        of_discriminator.zero_grad()
        discriminator(generator(torch.rand(4, 3)).detach()).sum().backward()
        of_discriminator.step()
        of_generator.zero_grad()
        discriminator(generator(torch.rand(4, 3))).sum().backward()
        of_generator.step()
        assert saves(points)


def test_a_step_that_a_scaler_skips_is_none(points):
    model, optimizer = trained()
    points.watch([optimizer])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    saved = []
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(model(torch.rand(2, 3)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        saved.append(saves(points))
    assert saved == [True, False, True]


def test_closures_and_compiled_steps_are_seen(points):
    model, _ = trained()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    points.watch([optimizer])

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert saves(points)
    assert not saves(points)


def test_an_optimizer_of_an_object_that_is_kept_is_followed_once_it_steps(points):
    model, optimizer = trained()
    assert saves(points)
    backward(model)
    optimizer.step()
    assert saves(points)
    assert not saves(points)


def test_optimizers_that_are_not_kept_beside_one_that_is_do_not_count(points):
    _, kept = trained()
    model, other = trained()
    points.watch([kept])
    backward(model)
    other.step()
    assert not saves(points)


class Wrapper(torch.optim.Optimizer):
    """Wrapper like Accelerate's: an Optimizer whose __init__ was never called."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        return self.optimizer.step(closure)


def test_a_wrapped_optimizer_is_seen(points):
    model, optimizer = trained()
    wrapper = Wrapper(optimizer)
    assert innermost(wrapper) is optimizer
    points.watch([wrapper])
    backward(model)
    wrapper.step()
    assert saves(points)


def test_a_group_that_is_added_later_is_looked_at(points):
    model, optimizer = trained()
    later = torch.nn.Linear(3, 1)
    points.watch([optimizer])
    optimizer.add_param_group({"params": list(later.parameters())})
    backward(model)
    backward(later)
    optimizer.step()
    assert saves(points)
    optimizer.step()
    backward(later)
    assert not saves(points)
