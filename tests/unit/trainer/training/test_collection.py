"""Garbage is collected at the steps that all ranks share, and at no other time."""

import gc
import weakref

import pytest

from concertina_trainer.training import collection


class Cycle:
    def __init__(self):
        self.itself = self


def garbage():
    """Return a reference to an object that only the collector can free, and create enough objects to start it."""
    reference = weakref.ref(Cycle())
    for _ in range(5):
        [[] for _ in range(gc.get_threshold()[0] * gc.get_threshold()[1])]
    return reference


def test_python_collects_without_a_schedule():
    assert garbage()() is None or garbage()() is None


def test_garbage_waits_for_the_next_step_of_the_schedule():
    with collection.scheduled():
        left = garbage()
        for step in range(1, collection.EVERY_STEPS):
            collection.after(step)
        assert left() is not None
        collection.after(collection.EVERY_STEPS)
        assert left() is None
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collection_is_enabled_again_after_an_error():
    with pytest.raises(KeyError), collection.scheduled():
        raise KeyError
    assert gc.isenabled()
