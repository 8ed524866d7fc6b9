"""Save points: the commits after which a state can be saved without losing a gradient.

A state holds weights and optimizer moments, not gradients. If it were saved within a gradient accumulation, a restored
run would lack the gradients of the micro-batches before the save. A commit is therefore a save point only if an
optimizer has made a step since the last commit, and no gradient has been computed since that step. A hook of torch
reports the steps of optimizers. torch also calls it for a `GradScaler`, for compiled steps, and for Accelerate's and
Lightning's optimizers.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable
from typing import Any, Optional

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from concertina_state.state_index import live

SAMPLE = 16
"""Number of an optimizer's parameters whose gradients are watched: a backward pass touches all of them, or none."""

Mark = Optional[tuple[int, int]]
"""Identity and version of a gradient; None if there is none."""


@dataclasses.dataclass
class WatchedOptimizer:
    """Optimizer, with the gradients of some of its parameters."""

    parameters: list[Tensor]
    marks: list[Mark]
    """Marks of the parameters' gradients right after the last step."""
    stepped: bool = False
    """True if the optimizer has made a step since the last commit."""

    def has_new_gradients(self) -> bool:
        """Return whether a backward pass has changed gradients since the optimizer's last step.

        This call reads from the device if gradients have changed.
        """
        changed = [
            gradient
            for parameter, mark in zip(self.parameters, self.marks)
            if (gradient := parameter.grad) is not None and _mark(gradient) != mark
        ]
        return any(bool(live(gradient).any()) for gradient in changed)  # gradients that were set to zero are not new


class SavePoints:
    """Commits after which a `State` can be saved, found from the steps of the optimizers.

    If the `State` has no optimizer, all optimizers that make steps in this process are watched, because one of them may
    be part of an object with its own `state_dict`. Until one of them makes a step, each commit is a save point.
    """

    def __init__(self) -> None:
        self._watched: dict[int, WatchedOptimizer] = {}
        """Watched optimizers, keyed by the id of the innermost optimizer."""
        self._keeps_optimizers = False
        self._last: WatchedOptimizer | None = None
        """The optimizer that stepped last."""
        self._idle: list[WatchedOptimizer] = []
        """Optimizers that made no step before the last commit."""
        self.only_others_step = False
        """True if an optimizer outside of the `State` has made a step, and none of the `State`'s own optimizers has."""
        weak_self = weakref.ref(self)

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (save_points := weak_self()) is not None:
                save_points._stepped(optimizer)

        handle = register_optimizer_step_post_hook(after_step)
        self.close = weakref.finalize(self, handle.remove)
        """Removes the hook that reports optimizer steps."""

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Begin to count the steps of optimizers that are part of the state."""
        for optimizer in optimizers:
            if not self._keeps_optimizers:
                self._keeps_optimizers = True
                self._watched.clear()
            self._watched[id(innermost(optimizer))] = _watched(optimizer)

    def pass_commit(self) -> bool:
        """Record a commit, and return whether an optimizer has made a step since the last commit.

        The result is also True if no optimizer is watched.
        """
        stepped = not self._watched or any(watched.stepped for watched in self._watched.values())
        self._idle = [watched for watched in self._watched.values() if not watched.stepped]
        for watched in self._watched.values():
            watched.stepped = False
        return stepped

    def has_pending_gradients(self) -> bool:
        """Return whether gradients still wait for an optimizer step.

        This method is called at a commit before which an optimizer has made a step. Pending gradients belong to an
        optimizer that has made no step, or were computed after the last step. With a GAN, the generator's backward pass
        leaves gradients in the discriminator, which has already made its step and will drop these gradients. If several
        optimizers made a step, only the last one is therefore checked.
        """
        candidates = [*self._idle, *([self._last] if self._last is not None else [])]
        return any(watched.has_new_gradients() for watched in candidates)

    def _stepped(self, optimizer: Optimizer) -> None:
        watched = self._watched.get(id(optimizer))
        if watched is None:
            if self._keeps_optimizers:
                self.only_others_step = self._last is None
                return
            watched = _watched(optimizer)
        if len(watched.parameters) != min(SAMPLE, _count(optimizer)):  # a group was added
            watched.parameters = _sample(optimizer)
        self._watched[id(optimizer)] = self._last = watched
        self.only_others_step = False
        watched.marks = [_mark(parameter.grad) for parameter in watched.parameters]
        watched.stepped = True


def innermost(optimizer: Any) -> Any:
    """Return the torch optimizer within a wrapper, such as Accelerate's. torch passes this optimizer to its hooks."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _watched(optimizer: Optimizer) -> WatchedOptimizer:
    parameters = _sample(optimizer)
    return WatchedOptimizer(parameters, [_mark(parameter.grad) for parameter in parameters])


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _sample(optimizer: Optimizer) -> list[Tensor]:
    """Return some of an optimizer's parameters, evenly spread. The last parameter is always included."""
    parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    count = min(SAMPLE, len(parameters))
    return [parameters[(number + 1) * len(parameters) // count - 1] for number in range(count)]


def _mark(gradient: Tensor | None) -> Mark:
    """Return a value that changes whenever a backward pass adds to the gradient.

    The mark contains the version of the local tensor: FSDP adds to the local part of a DTensor, and the version of the
    DTensor itself does not change.
    """
    if gradient is None:
        return None
    local = live(gradient)
    return id(gradient), 0 if torch.is_inference(local) else local._version
