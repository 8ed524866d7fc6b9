"""Module that Python imports as it starts if this folder is on its PYTHONPATH; scripts start warm from here.

The command is started unchanged, with this folder before its PYTHONPATH. Before Python reaches its file, module or
code, it imports `sitecustomize` and finds this module. In a parent of scripts, it imports the modules to keep warm, and
forks. Each child returns from here, and Python itself then runs what its command line says (decision "Python itself
runs the script"). Any other interpreter of a worker's command hands itself over to such a child, or returns from here
(decision "An interpreter hands itself over").
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

VARIABLE = "CONCERTINA_WARM_PARENT"
SOCKET = "CONCERTINA_WARM_SOCKET"
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = HERE.rsplit(os.sep, 3)[0]


def _become_parent(settings: str) -> None:
    """Import modules and fork. This function returns in a child."""
    initial_modules, root = set(sys.modules), ROOT
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


def _hand_over(path: str) -> None:
    """Hand this interpreter over. This function returns if the script starts here."""
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder != HERE]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    if not folders:
        del os.environ["PYTHONPATH"]
    if sys.version_info < (3, 9) or sys.implementation.name != "cpython":
        return
    initial_modules = set(sys.modules)
    sys.path.insert(0, ROOT)
    try:
        from concertina_agent.workers import hand_over
    except Exception:  # without the agent's package the script starts here
        return
    finally:
        sys.path.remove(ROOT)
    hand_over.run(path, initial_modules)


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


sys.path[:] = [folder for folder in sys.path if folder != HERE]
if VARIABLE in os.environ:
    _become_parent(os.environ.pop(VARIABLE))
elif SOCKET in os.environ:
    _hand_over(os.environ.pop(SOCKET))
_import_next()
