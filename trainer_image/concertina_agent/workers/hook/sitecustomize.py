"""What a Python imports as it starts, where this folder is first on its PYTHONPATH: a parent of scripts begins here.

The command is started as it stands, with this folder before its PYTHONPATH. Before Python has come to its file, module
or code it imports `sitecustomize`, and finds this; here it imports what is to be warm, and forks. Each child returns
from here: Python itself goes on to run what its command line says (decision "Python itself runs the script")."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

VARIABLE = "CONCERTINA_WARM_PARENT"


def _begin(settings: str) -> None:
    """Returns in a child."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if folder != here]
    known, root = set(sys.modules), here.rsplit(os.sep, 3)[0]
    sys.path.insert(0, root)
    try:
        from concertina_agent.workers import script_parent

        sys.path.remove(root)
        script_parent.run(settings, known)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(70)  # never on to the script, which would take this for a worker
    for name in [name for name in sys.modules if name.partition(".")[0] in ("concertina_agent", "concertina_protocol")]:
        del sys.modules[name]


def _go_on() -> None:
    """With the sitecustomize that Python would have found; as if there were none where it would not."""
    found = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if found is None or found.loader is None:
        raise ImportError("there is none", name="sitecustomize")  # as `site` expects it
    module = importlib.util.module_from_spec(found)
    sys.modules["sitecustomize"] = module
    found.loader.exec_module(module)


if VARIABLE in os.environ:
    _begin(os.environ.pop(VARIABLE))
    _go_on()
