"""Warm parent of the bundled trainer."""

import sys

from builders.train.node import Parent


def test_a_worker_collects_garbage_although_its_parent_imports_without() -> None:
    parent = Parent("json")
    try:
        pid = parent.fork("gc:isenabled", {}, sys.__stderr__.fileno())
        assert parent.wait(pid) == 1, "gc.isenabled() is the exit code"
    finally:
        parent.close()
