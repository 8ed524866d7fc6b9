"""Give an older torch the names that concertina uses from the torch of the lock.

`make test-gpu` puts this folder on PYTHONPATH, so Python imports this module at the start of every process of a check:
pytest, the trainer's workers, scripts. Nothing is changed where the names exist. torch 2.11 is the oldest one that is
supported. A check that needs more than names is not runnable on an older torch: see TORCH_FEATURES in
tests/builders/gpu/probe.py.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

RENAMED = {
    "torch.distributed": {
        "all_gather_single": "all_gather_into_tensor",
        "reduce_scatter_single": "reduce_scatter_tensor",
    },
    "torch.distributed._functional_collectives": {
        "all_gather_single": "all_gather_tensor",
        "reduce_scatter_single": "reduce_scatter_tensor",
    },
    "torch._C._distributed_c10d": {"FakeStore": "HashStore"},
}
"""For each module: the new name, and the older torch's name of the same thing."""
REPLACED = {"torch.distributed.pipelining.stage": {"PipelineStage": "_output_slot_is_releasable"}}
"""For each module: a class, and a method that concertina replaces while it plans. The older torch never calls it."""
MADE_BY = {"torch.distributed": "torch._C._distributed_c10d"}
"""Modules that exist once another one has been imported, without a finder's help."""

added: list[str] = []
"""Names that this process has been given."""


def add_names(module: ModuleType) -> None:
    for new, old in RENAMED.get(module.__name__, {}).items():
        if not hasattr(module, new) and hasattr(module, old):
            setattr(module, new, getattr(module, old))
            added.append(f"{module.__name__}.{new}")
    for owner, method in REPLACED.get(module.__name__, {}).items():
        if hasattr(module, owner) and not hasattr(getattr(module, owner), method):
            setattr(getattr(module, owner), method, None)
            added.append(f"{module.__name__}.{owner}.{method}")


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        add_names(module)
        if made := sys.modules.get(MADE_BY.get(module.__name__, "")):
            add_names(made)


class _Finder(importlib.abc.MetaPathFinder):
    """Find a module as Python does, and add names once the module has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in RENAMED and fullname not in REPLACED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
