"""Commands that run plainly, and with scripts in forks of parents that have imported what they need: equal results."""

from pathlib import Path

import pytest

from builders import pythons
from builders.train.starts import WARMTH, alike, prepare, started, written

THREADS = """
        import torch
        print(torch.get_num_threads(), torch.get_num_interop_threads(), torch.__config__.parallel_info())
        torch.rand(300, 300) @ torch.rand(300, 300)
        torch.rand(1 << 18).exp()
        print(len(os.listdir("/proc/self/task")))
"""
SCRIPTS = {
    "what a script knows of itself": """
        print(sys.argv, sys.path, sys.orig_argv[1:], __name__, __file__, __spec__, __package__, __doc__, __builtins__)
        print(sorted(vars(sys.modules["__main__"])), sys.flags, sys.warnoptions, sys._xoptions, sys.executable)
        print(os.getcwd(), sys.stdin.isatty(), os.path.realpath("/dev/fd/0"), sys.dont_write_bytecode)
        print(sorted(os.listdir("/proc/self/fd")), open("/proc/self/cmdline").read(), open("/proc/self/comm").read())
        print([name for name in sys.modules if "concertina" in name or name == "sitecustomize"])
        print({name: value for name, value in sorted(os.environ.items()) if name != "_"})
        print(os.getsid(0) == os.getpid() == os.getpgid(0), os.umask(0o22), os.nice(0))
    """,
    "signals, stack, modules, pickles, warnings and subprocesses": """
        import signal
        print({n.name: str(signal.getsignal(n)) for n in signal.valid_signals() if isinstance(n, signal.Signals)})
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.set_wakeup_fd(-1))
        lines = open("/proc/self/status").read().splitlines()
        # SigQ counts what all processes of the user have queued.
        print([line for line in lines if line.startswith(("Sig", "Shd", "Thr")) and "SigQ" not in line])
        import inspect, traceback
        traceback.print_stack()
        print(len(inspect.stack()), sys.getrecursionlimit())
        def deeper(n):
            try:
                return deeper(n + 1)
            except RecursionError:
                return n
        print(deeper(0))
        import beside
        print(beside.VALUE, beside.__file__)
        import dataclasses, pickle
        @dataclasses.dataclass
        class Point:
            x: int
        data = pickle.dumps([Point(1), Point])
        print(data, pickle.loads(data), Point.__module__, sys.modules["__main__"].Point is Point)
        import warnings
        warnings.warn("old", DeprecationWarning)
        warnings.warn("once")
        import subprocess
        print(subprocess.run([sys.executable, "-c", "import sys, os; print(sys.path, os.environ.get('PYTHONPATH'))"],
              capture_output=True, text=True).stdout)
        print(subprocess.run("echo $RANK; exit 3", shell=True).returncode)
    """,
    "ended by SIGTERM": "import signal; print('before'); os.kill(os.getpid(), signal.SIGTERM); print('after')",
    "ended by SIGINT": "import signal; print('before'); os.kill(os.getpid(), signal.SIGINT); print('after')",
    "SIGINT is caught": """
        import signal, time
        try:
            os.kill(os.getpid(), signal.SIGINT); time.sleep(9)
        except KeyboardInterrupt as error:
            print("caught", repr(error))
    """,
    "exit of a number": "sys.exit(7)",
    "exit of a text": "sys.exit('a reason')",
    "exit of nothing": "print('x'); sys.exit()",
    "exit without an end": "print('lost?', end=''); os._exit(9)",
    "an exception": "def f():\n    raise ValueError('bad row')\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    f()",
    "a syntax error": "print('never')\nif True print()",
    "an excepthook": "sys.excepthook = lambda *a: print('hook', a[0], len(a)); raise KeyError(1)",
    "atexit, threads and the end of objects": """
        import atexit, threading, time, weakref
        class Thing:
            def __del__(self):
                print("thing ends")
        thing = Thing()
        atexit.register(print, "at exit")
        weakref.finalize(thing, print, "finalized")
        threading.Thread(target=lambda: (time.sleep(0.3), print("thread ends"))).start()
        threading.Thread(target=lambda: time.sleep(99), daemon=True).start()
        print(threading.current_thread().name, threading.main_thread().ident == threading.get_ident())
        print(threading.active_count(), "main ends")
    """,
    "three ways of multiprocessing": """
        import multiprocessing
        def double(x):
            return 2 * x, __name__
        class Own:
            pass
        if __name__ == "__main__":
            for method in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(method).Pool(2) as pool:
                    print(method, pool.map(double, range(3)), multiprocessing.current_process())
    """,
    "faulthandler": """
        import faulthandler
        faulthandler.enable()
        def crash():
            faulthandler.dump_traceback()
            faulthandler._sigsegv()
        crash()
    """,
    "threads of numpy, and random numbers that are not those of others": """
        import random, numpy
        print(len(os.listdir("/proc/self/task")))
        drawn = [str(random.random()), str(numpy.random.rand())]
        print([each in open("seen").read() for each in drawn])
        open("seen", "a").write(" ".join(drawn))
    """,
    "torch's random numbers are not those of others": """
        import torch
        drawn = [str(torch.initial_seed()), str(torch.rand(1, dtype=torch.float64).item())]
        print([each in open("seen").read() for each in drawn])
        open("seen", "a").write(" ".join(drawn))
    """,
    "what a package has seeded stays seeded": """
        import numpy, torch, seeds
        print(torch.initial_seed(), torch.rand(1).item(), numpy.random.rand())
    """,
    "threads of torch": THREADS,
    "threads of torch, as it says before": f"""
        os.environ['OMP_NUM_THREADS'] = '3'{THREADS}""",
    "the collector": """
        import gc, numpy
        print(gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.callbacks, gc.garbage)
        class Cycle:
            def __init__(self):
                self.self = self
            def __del__(self):
                print("collected")
        Cycle()
        print(gc.collect() > 0, any(type(each) is Cycle for each in gc.get_objects()))
    """,
    "variables set before an import": """
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        import numpy
        print(len(os.listdir("/proc/self/task")), os.environ.get("READ_WHEN_IMPORTED"))
        os.environ["READ_WHEN_IMPORTED"] = "yes"
        import reads_variables
        print(reads_variables.VALUE)
    """,
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return prepare(tmp_path)


MORE = (
    "threads of torch", "threads of torch, as it says before", "what a package has seeded stays seeded",
    "torch's random numbers are not those of others", "exit of nothing",
)  # fmt: skip
"""Cases of the long suite.

Those of torch start three processes that import it, beside those of others that do. The last one differs from another
case of the gate in the exit code alone.
"""
LAW = "tests/train/scripts/test_warm_start.py::test_a_script_is_run_as_if_started_plainly"
OTHER_PYTHON = "tests/train/scripts/test_warm_start.py::test_the_users_python_may_be_another_than_the_agents"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long(law=LAW)] if name in MORE else []) for name in SCRIPTS]
)
def test_a_script_is_run_as_if_started_plainly(name, place):
    written(place, SCRIPTS[name])
    warmth = "" if name == "a syntax error" else WARMTH
    alike(started(place, "python", "script.py", "--flag", "a b", warmth=warmth))


OTHERS = [Path.home() / f".pyenv/versions/{version}" for version in ("3.10*", "3.12*", "3.13*")]


def other_pythons() -> list[str]:
    """Of other versions than ours, where they are installed."""
    found = [sorted(place.parent.glob(f"{place.name}/bin/python")) for place in OTHERS]
    return [python for python in (pythons.oldest(), *(str(each[-1]) for each in found if each)) if python]


@pytest.mark.parametrize(
    "number",
    [
        "1",
        pytest.param(
            "100",  # OpenBLAS takes no more than there are processors
            marks=pytest.mark.long(
                law="tests/train/scripts/test_warm_start.py::test_libraries_have_as_many_threads_as_the_worker_says[1]"
            ),
        ),
    ],
)
def test_libraries_have_as_many_threads_as_the_worker_says(number, place):
    written(place, THREADS)
    out, _, _ = alike(started(place, "python", "script.py", OMP_NUM_THREADS=number))
    assert number != "1" or "at::get_num_threads() : 1\n" in out


@pytest.mark.skipif(not other_pythons(), reason=pythons.WITHOUT)
@pytest.mark.parametrize(
    "name",
    [
        "what a script knows of itself",
        *(
            pytest.param(name, marks=pytest.mark.long(law=f"{OTHER_PYTHON}[what a script knows of itself]"))
            for name in ("an exception", "three ways of multiprocessing")
        ),
    ],
)
def test_the_users_python_may_be_another_than_the_agents(name, place):
    written(place, SCRIPTS[name].replace(", sys.orig_argv[1:]", ""))  # which 3.9 does not know
    for python in other_pythons():
        alike(started(place, python, "script.py", "--flag"))


WAYS = {
    "options": ("python", "-u", "-X", "dev", "-W", "ignore", "-O", "script.py", "x"),
    "a path": ("python", "folder/../script.py"),
    "a package": ("python", "-m", "package", "--flag"),
    "a module": ("python", "-m", "script", "-c"),
    "code": ("python", "-c", "import sys; print(__name__, sys.argv, repr(sys.path[0]), 1/0)", "-m"),
    "bash": ("bash", "-c", 'exec python script.py "$@"', "bash", "one", "two words"),
    "bash and its settings": ("bash", "-ec", "set -euo pipefail\nexec python script.py \\\n  --lr '1 2'\n"),
    "sh": ("sh", "-c", "exec python script.py one"),
    "bash without exec": ("bash", "-c", "python script.py one"),
    "env": ("env", "python", "script.py"),
    "a file that is not there": ("python", "missing.py"),
    "a module that is not there": ("python", "-m", "no_such_module"),
}


PLAIN_LAW = "tests/train/scripts/test_warm_start.py::test_a_command_is_run_as_if_started_plainly[bash]"
SAME = ("bash and its settings", "sh", "env", "a path", "a module that is not there")
"""Ways that start a script as another one does."""


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.long(law=PLAIN_LAW)] if way in SAME else []) for way in WAYS]
)
def test_a_command_is_run_as_if_started_plainly(way, place):
    (place / "folder").mkdir()
    written(place, SCRIPTS["what a script knows of itself"])
    written(place, "from . import other; print(__name__, __package__, __spec__.name, sys.argv)", "package/__main__.py")
    written(place, "", "package/other.py")
    alike(started(place, *WAYS[way], warmth="" if "not there" in way or way == "code" else WARMTH))


@pytest.mark.parametrize("unbuffered", ["1", "no"])
def test_what_is_printed_is_buffered_as_ever(unbuffered, place):
    written(place, "print(sys.stdout.line_buffering, sys.stdout.write_through); print('kept'); os._exit(0)")
    out, _, _ = alike(started(place, "python", "script.py", PYTHONUNBUFFERED=unbuffered))
    assert ("kept" in out) == (unbuffered == "1")


BOUNDS = {
    "memory": ("HELD = b'x' * (100 << 20)", {"memory": 256 << 20}, "its imports need more than 64 MiB of memory"),
    "time": (
        "import time; HELD = time.sleep(0 if os.environ.get('RANK') else 600)",
        {"seconds": 5},
        "its imports take longer than 5 s",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bound", BOUNDS)
def test_what_is_imported_has_bounds_beyond_which_each_worker_imports_it(bound, place):
    heavy, bounds, why = BOUNDS[bound]
    (place / "site-packages" / "heavy.py").write_text("import os\n" + heavy)
    written(place, "print('heavy' in sys.modules); import heavy; print(len(sys.argv))")
    ways = started(place, "python", "script.py", bounds=bounds, warmth="0000")
    assert ways.pop("why")[2] == why
    assert alike(ways)[0] == "False\n1"


def test_what_is_preloaded_has_the_bounds_too(place):
    heavy, bounds, why = BOUNDS["memory"]
    (place / "site-packages" / "heavy.py").write_text("import os\n" + heavy)
    written(place, "print('heavy' in sys.modules)")
    ways = started(place, "python", "script.py", preload=("heavy",), bounds=bounds, warmth="0000")
    assert ways.pop("why")[2] == why
