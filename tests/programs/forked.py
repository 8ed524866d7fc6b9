"""Script that runs in a fork of a process with its imports, as `python SCRIPT ARGUMENT...` would run it.

FORKED_FOLDER is the folder that it runs in, and FORKED_COMMAND its arguments as JSON, the script first.
"""

import atexit
import json
import os
import runpy
import sys


def main() -> None:
    os.chdir(os.environ["FORKED_FOLDER"])
    sys.argv = json.loads(os.environ["FORKED_COMMAND"])
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # A fork leaves them out.
