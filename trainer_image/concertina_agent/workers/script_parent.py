"""In the user's own Python, before its script: imports what the script will, and forks (called by `hook`).

{"probe": true, ...}     says {"held": true} and ends: this Python comes by here
{"modules": PATH, ...}   a parent, as `forkserver` says; it also says {"leave_out": module, "why": ...} and ends,
                         where a module must not be imported before the fork, and {"failed": module, "why": ...} of
                         one that was asked for. Its answers know {"stale": path} besides: a file of what it has
                         imported has changed
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Optional

from concertina_agent.workers import blas
from concertina_agent.workers.family import die_with_parent
from concertina_agent.workers.forkserver import STOPPING, Forkserver, unfit
from concertina_agent.workers.learned import Imported, Recorder, read

MOST_FILES = 30_000
NAME = "concertina-warm"
"""As `ps` shows it, so that nobody takes it for a worker."""
BLAS = "OPENBLAS_NUM_THREADS"
PACKAGES = ("site-packages", "dist-packages")


@dataclasses.dataclass(frozen=True)
class ParentConfig:
    """What the agent says to it."""

    agent: int
    """Its pid."""
    control: int
    """File descriptor."""
    python_path: Optional[str]
    """PYTHONPATH as the command has it."""
    probe: bool = False
    folder: str = ""
    """Where the script's own modules lie: first on its sys.path."""
    script: str = ""
    """The file that it is, where it is one."""
    modules: str = ""
    """File of what was learned."""
    preload: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    varying: tuple[str, ...] = ()
    """Variables of which the agent knows that workers differ in them."""
    most_memory: int = 0
    """Bytes of its own that the imports may take."""


def run(text: str, known: Iterable[str]) -> None:
    """Returns in each child. `known`: modules that were there before ours."""
    told = ParentConfig(**json.loads(text))
    die_with_parent(told.agent)
    _set_variable("PYTHONPATH", told.python_path)
    control = socket.socket(fileno=told.control)
    if told.probe:
        control.send(json.dumps({"held": True}).encode())
        os._exit(0)
    before = {number: signal.getsignal(number) for number in (*STOPPING, signal.SIGCHLD)}
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    name = _renamed(NAME)
    files: dict[str, tuple[int, ...]] = {}
    server = Forkserver(control, lambda: _refused(files))
    why = _in_the_way(told.folder, known)
    if why:
        server.send({"error": why})
        os._exit(0)
    wanted = _wanted(told, read(told.modules))
    _preload(told, wanted, server)
    gc.collect()
    gc.freeze()
    files.update(_files())
    if told.script:
        files[told.script] = _look(told.script)
    server.send({"warm": True})
    forked = server.serve()
    if forked is None:
        os._exit(0)
    _renamed(name)
    for number, handler in before.items():
        signal.signal(number, handler)
    _be_oneself(wanted)
    if forked.request.get("record"):
        sys.meta_path.insert(0, Recorder(told.modules))


def _be_oneself(wanted: Iterable[Imported]) -> None:
    """In a child: what a process of its own would not share with others, and what the parent had for itself alone."""
    importlib.invalidate_caches()
    threads = {name: value for each in wanted for name, value in each.changes.items() if value is not None}
    blas.set_threads({**os.environ, **threads})
    _draw_anew()


def _draw_anew() -> None:
    """Generators that numpy and torch seeded by chance when they were imported; `random` Python seeds itself. What a
    package has seeded on purpose while it was imported stays so."""
    if (numpy := sys.modules.get("numpy.random")) is not None and numpy.get_bit_generator()._seed_seq is not None:
        numpy.seed()
    torch = getattr(sys.modules.get("torch"), "default_generator", None)
    if torch is not None and torch.initial_seed() >= 1 << 32:  # by chance it is one of 64 bits, and nobody's choice
        torch.seed()


# --- what is imported ---------------------------------------------------------------------------------------------


def _wanted(told: ParentConfig, learned: Iterable[Imported]) -> list[Imported]:
    asked = [Imported(name) for name in told.preload]
    installed = [each for each in learned if _is_installed(each.package)]
    return [each for each in (*asked, *installed) if each.package not in told.left_out]


@functools.cache
def _is_installed(package: str) -> bool:
    """Whether it is in a folder of installed packages: what lies elsewhere is the script's own."""
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.machinery.PathFinder.find_spec(package, sys.path)
    places = [] if spec is None else list(spec.submodule_search_locations or [spec.origin or ""])
    return any(_of_package(place) or _is_filled_by_pip(os.path.dirname(place)) for place in places)


@functools.cache
def _is_filled_by_pip(folder: str) -> bool:
    """As by `pip install --target`: what it installs is recorded beside it."""
    with contextlib.suppress(OSError):
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    return False


def _preload(told: ParentConfig, wanted: Iterable[Imported], server: Forkserver) -> None:
    given = dict(os.environ)
    sys.path.insert(0, told.folder)
    changes: Optional[Mapping[str, Optional[str]]] = None
    try:
        with _Asked() as asked:
            for each in wanted:
                if each.changes != changes:
                    changes = each.changes
                    _set_environment({**given, **changes, BLAS: "1"})
                _import(each, each.name in told.preload, server)
                why = _why_not(asked, told)
                if why:
                    server.send({"leave_out": each.package, "why": why})
                    os._exit(0)
                if _own_memory() > told.most_memory:
                    server.send({"error": f"its imports take more than {told.most_memory >> 20} MiB of memory"})
                    os._exit(0)
    finally:
        sys.path.remove(told.folder)
        _set_environment(given)
        sys.stdout.flush()
        sys.stderr.flush()


def _import(each: Imported, asked_for: bool, server: Forkserver) -> None:
    try:
        importlib.import_module(each.name)
    except BaseException as error:  # whatever it is, the script meets it again
        if asked_for:
            traceback.print_exc()
            server.send({"failed": each.name, "why": f"{type(error).__name__}: {error}"[:300]})


def _why_not(asked: _Asked, told: ParentConfig) -> str:
    """What was imported last must not have been."""
    varying = asked.names & {name.encode() for name in told.varying}
    if varying:
        return f"it reads {min(varying).decode()} when it is imported"
    return unfit()


class _Asked(dict[bytes, bytes]):
    """Stands for the process's variables, and remembers which were asked for."""

    def __init__(self) -> None:
        self._data: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
        super().__init__(self._data)
        self.names: set[bytes] = set()

    def __enter__(self) -> _Asked:
        os.environ._data = self  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        self._data.clear()  # os.environb has it too
        self._data.update(self)
        os.environ._data = self._data  # type: ignore[attr-defined]

    def __getitem__(self, name: bytes) -> bytes:
        self.names.add(name)
        return super().__getitem__(name)


def _set_environment(wanted: Mapping[str, Optional[str]]) -> None:
    for name in [name for name in os.environ if wanted.get(name) is None]:
        del os.environ[name]
    for name, value in wanted.items():
        _set_variable(name, value)


def _set_variable(name: str, value: Optional[str]) -> None:
    if value is not None:
        os.environ[name] = value
        return
    with contextlib.suppress(KeyError):
        del os.environ[name]


# --- whether it may be forked -------------------------------------------------------------------------------------


def _refused(files: Mapping[str, tuple[int, ...]]) -> Mapping[str, str]:
    why = unfit()
    if why:
        return {"unfit": why}
    changed = next((path for path, seen in files.items() if _look(path) != seen), None)
    return {} if changed is None else {"stale": changed}


def _own_memory() -> int:
    with open("/proc/self/status") as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def _in_the_way(folder: str, known: Iterable[str]) -> str:
    """A module of the script's that has the name of one that only we have imported would not be found any more."""
    ours = {name for name in sys.modules if "." not in name} - set(known)
    with contextlib.suppress(OSError):
        for entry in sorted(os.listdir(folder)):
            name = entry.partition(".")[0]
            if name in ours and (entry == name or entry == f"{name}.py"):
                return f"{entry} beside the script has the name of a module of Python's own"
    return ""


def _files() -> dict[str, tuple[int, ...]]:
    """Those of all imported modules that are not Python's own, as they are."""
    standard = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
    found: dict[str, tuple[int, ...]] = {}
    for module in list(sys.modules.values()):
        path = _path(module)
        if path and len(found) < MOST_FILES and not (path.startswith(standard) and not _of_package(path)):
            found[path] = _look(path)
    return found


def _path(module: object) -> str:
    path = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
    return path if isinstance(path, str) and os.path.isabs(path) else ""


def _of_package(path: str) -> bool:
    return any(f"/{name}/" in path for name in PACKAGES)


def _look(path: str) -> tuple[int, ...]:
    """Empty where there is none."""
    try:
        seen = os.stat(path)
    except OSError:
        return ()
    return (seen.st_mtime_ns, seen.st_size, seen.st_ino)


def _renamed(name: str) -> str:
    """The process's name until now."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "r+") as file:
        before = file.read().rstrip("\n")
        file.seek(0)
        file.write(name)
        return before
    return name
