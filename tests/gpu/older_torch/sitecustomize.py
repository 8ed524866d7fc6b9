"""Give an older torch the names that concertina uses from the torch of the lock.

`make test-gpu` puts this folder on PYTHONPATH, so Python imports this module at the start of every process of a check:
pytest, the trainer's workers, scripts. Only names are added, each for a function that the older torch has under
another name. torch 2.11 is the oldest one that this was tested with. Where the name exists nothing is changed.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys

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
"""For each module: the new name, and the older torch's name of the same."""
BUILT_IN = {"torch._C._distributed_c10d": "torch.distributed"}
"""Modules that no import executes, and the module whose import makes them."""

added: list[str] = []
"""Names that this process has been given."""


def add_names(name: str) -> None:
    module = sys.modules[name]
    for new, old in RENAMED.get(name, {}).items():
        if not hasattr(module, new) and hasattr(module, old):
            setattr(module, new, getattr(module, old))
            added.append(f"{name}.{new}")


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec):
        return self._loader.create_module(spec)

    def exec_module(self, module) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for name in (module.__name__, *(name for name, maker in BUILT_IN.items() if maker == module.__name__)):
            if name in sys.modules:
                add_names(name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module as the finders after it do, and adds names once the module has been executed."""

    def find_spec(self, fullname: str, path, target=None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in RENAMED or fullname in BUILT_IN:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
