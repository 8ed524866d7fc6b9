"""Module that Python imports as it starts if this folder is first on its PYTHONPATH; a parent of scripts begins here.

The command is started unchanged, with this folder before its PYTHONPATH. Before Python reaches its file, module or
code, it imports `sitecustomize` and finds this module, which imports the modules to keep warm, and forks. Each child
returns from here, and Python itself then runs what its command line says (decision "Python itself runs the script").

Any other interpreter of a worker's command hands itself over to such a child, or returns from here (`hand_over`,
decision "An interpreter hands itself over").

In each Python of a worker, forked or not, this module also has torch's optimizers count their steps, unless
`spec.stepDetection` is off (`optimizer_steps`).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

VARIABLE = "CONCERTINA_WARM_PARENT"
SOCKET = "CONCERTINA_WARM_SOCKET"
STEP_FILE = "CONCERTINA_STEP_FILE"
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = HERE.rsplit(os.sep, 3)[0]
"""Path from which `concertina_agent` is imported."""


def _become_parent(settings: str) -> None:
    """Import modules and fork. This function returns in a child."""
    initial_modules = set(sys.modules)
    sys.path.insert(0, ROOT)
    try:
        from concertina_agent.workers import script_parent

        sys.path.remove(ROOT)
        script_parent.run(settings, initial_modules)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(70)  # never continue to the script, which would run as if in a worker
    _forget_own_modules()


def _hand_over(socket: str) -> None:
    """Hand this interpreter over. This function returns if the script starts here."""
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
    hand_over.run(socket, initial_modules)


def _count_steps(path: str) -> None:
    """Count the optimizer steps of this process into a file. The script continues if that is not possible."""
    sys.path.insert(0, ROOT)
    try:
        from concertina_agent.workers import optimizer_steps

        optimizer_steps.install(path)
    except Exception:
        return
    finally:
        sys.path.remove(ROOT)
        _forget_own_modules()


def _forget_own_modules() -> None:
    """Remove the agent's modules, which a script could mistake for its own."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("concertina_agent", "concertina_protocol")]:
        del sys.modules[name]


def _import_next() -> None:
    """Execute the sitecustomize that Python would have found without concertina's.

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
if STEP_FILE in os.environ:
    _count_steps(os.environ[STEP_FILE])
_import_next()
