"""Cached properties without a lock.

Up to Python 3.11, `functools.cached_property` takes a lock. No lock is needed here, because only one planning pass uses
an observation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class cached(Generic[T]):
    """A property that is computed on first access and then stored as an attribute of the instance."""

    def __init__(self, work: Callable[[Any], T]) -> None:
        self._work, self._name, self.__doc__ = work, work.__name__, work.__doc__

    def __get__(self, instance: Any, owner: type) -> T:
        value: T = self._work(instance)
        instance.__dict__[self._name] = value
        return value
