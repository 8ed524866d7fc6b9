"""Start hook for Python: Python imports this `sitecustomize` when this folder is first in PYTHONPATH.

The hook has three uses:
- In a warm parent, it imports modules and forks on request. The parent is started with the command line of the user's
  script. Before Python runs that script, Python imports this module. In the parent, the import does not return. In each
  fork, the import returns, and Python itself then runs the script (decision "Warm starts run scripts through
  sitecustomize").
- In any other interpreter of a worker's command, the hook lets such a fork run the interpreter's script. If this is not
  possible, the hook returns, and the script starts in this interpreter (`hand_over`, decision "Warm starts of commands
  with shells and wrappers").
- In each Python process of a worker, it makes torch's optimizers count their steps, unless `spec.stepDetection` is off
  (`optimizer_steps`).
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
"""Path that contains the package `concertina_agent`."""


def _become_parent(settings: str) -> None:
    """Become a parent process that imports modules and forks workers. This function returns only in a fork."""
    initial_modules = set(sys.modules)
    sys.path.insert(0, ROOT)
    try:
        from concertina_agent.workers import script_parent

        sys.path.remove(ROOT)
        script_parent.run(settings, initial_modules)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(70)  # never run the script in the parent itself
    _forget_own_modules()


def _hand_over(socket: str) -> None:
    """Let a fork of a warm process run the script of this interpreter.

    This function returns if the script has to start here.
    """
    if sys.version_info < (3, 9) or sys.implementation.name != "cpython":
        return
    initial_modules = set(sys.modules)
    sys.path.insert(0, ROOT)
    try:
        from concertina_agent.workers import hand_over
    except Exception:  # without the agent's package, the script starts here
        return
    finally:
        sys.path.remove(ROOT)
    hand_over.run(socket, initial_modules)


def _count_steps(path: str) -> None:
    """Count the optimizer steps of this process in a file. If that is impossible, the script runs without a count."""
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
    """Remove the agent's modules from `sys.modules`, because a script could have modules with the same names."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("concertina_agent", "concertina_protocol")]:
        del sys.modules[name]


def _import_next() -> None:
    """Run the `sitecustomize` that Python would have imported if this one did not exist.

    Raises:
        ImportError: If there is no other `sitecustomize`. Python's `site` expects this error.
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
