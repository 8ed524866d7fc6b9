"""Cached properties without a lock.

Up to Python 3.11, functools.cached_property takes a lock. None is needed here, because an observation belongs to one
pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class cached(Generic[T]):
    """A property that is computed on first access, and is an attribute of the instance from then on."""

    def __init__(self, work: Callable[[Any], T]) -> None:
        self._work, self._name, self.__doc__ = work, work.__name__, work.__doc__

    def __get__(self, instance: Any, owner: type) -> T:
        value: T = self._work(instance)
        instance.__dict__[self._name] = value
        return value
