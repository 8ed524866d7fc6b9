"""Module that Python imports as it starts if this folder is first on its PYTHONPATH; a parent of scripts begins here.

The command is started unchanged, with this folder before its PYTHONPATH. Before Python reaches its file, module or
code, it imports `sitecustomize` and finds this module, which imports the modules to keep warm, and forks. Each child
returns from here, and Python itself then runs what its command line says (decision "Python itself runs the script").
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

VARIABLE = "CONCERTINA_WARM_PARENT"


def _become_parent(settings: str) -> None:
    """Import modules and fork. This function returns in a child."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if folder != here]
    initial_modules, root = set(sys.modules), here.rsplit(os.sep, 3)[0]
    sys.path.insert(0, root)
    try:
        from concertina_agent.workers import script_parent

        sys.path.remove(root)
        script_parent.run(settings, initial_modules)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(70)  # never continue to the script, which would run as if in a worker
    for name in [name for name in sys.modules if name.partition(".")[0] in ("concertina_agent", "concertina_protocol")]:
        del sys.modules[name]


def _import_next() -> None:
    """Execute the sitecustomize that Python would have found without this one.

    Raises:
        ImportError: If there is none, as `site` expects.
    """
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        raise ImportError("there is none", name="sitecustomize")  # as `site` expects it
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if VARIABLE in os.environ:
    _become_parent(os.environ.pop(VARIABLE))
    _import_next()
