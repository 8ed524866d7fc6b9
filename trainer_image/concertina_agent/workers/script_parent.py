"""Warm parent of a user's script: a process of the user's own Python that imports modules and forks on request.

The start hook calls `run` before the script would begin (`hook`). The agent passes a configuration:

    {"probe": true, ...}     Send {"held": true} and exit. This shows that this Python imports the hook.
    {"modules": PATH, ...}   Become a warm parent, with the messages of `forkserver` and these differences:
                             - {"warm": true} also has the number of imported packages, the environment variables that
                               their imports have read, and the properties of the interpreter.
                             - {"leave_out": module, "why": ...} is sent if a module must not be imported before a fork.
                               The parent then exits.
                             - {"failed": module, "why": ...} is sent if a requested module cannot be imported.
                             - {"stale": path} is the answer to a request if an imported file has changed.
                             - The request {"import": true} makes the parent import the modules that were added to the
                               file, and send {"warm": true} again. The agent sends this request only while the parent
                               has no children, because children end when the parent has to exit.
                             - The request {"take": description} makes a fork take over an interpreter (`take_over`).
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
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Optional

from concertina_agent.workers import blas, hand_over, take_over
from concertina_agent.workers.family import die_with_parent
from concertina_agent.workers.forkserver import STOPPING, Forkserver, reset_signals, unfit
from concertina_agent.workers.learned import PACKAGES, Imported, Recorder, read

MOST_FILES = 30_000
NAME = "concertina-warm"
"""Name in `ps` of a process that forks workers. It distinguishes the process from the workers."""
BLAS = "OPENBLAS_NUM_THREADS"


@dataclasses.dataclass(frozen=True)
class ParentConfig:
    """Configuration that the agent passes to a process which imports modules and forks workers."""

    agent: int
    """Process id of the agent."""
    control: int
    """File descriptor of the socket to the agent."""
    probe: bool = False
    folder: str = ""
    """Folder of the script's own modules, which is first in the script's `sys.path`."""
    script: str = ""
    """Path of the script, or "" if the program is a module or code."""
    modules: str = ""
    """Path of the file that lists the modules to import (see `learned`)."""
    preload: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    varying: tuple[str, ...] = ()
    """Names of environment variables that differ between workers, as far as the agent knows such variables."""
    most_memory: int = 0
    """Maximum bytes of its own memory that this process may use for imports."""


def run(text: str, initial_modules: Iterable[str]) -> None:
    """Import modules, and fork when the agent requests it. This function returns only in a fork.

    Args:
        text: ParentConfig as JSON.
        initial_modules: Modules that were imported before those of this package.
    """
    config = ParentConfig(**json.loads(text))
    die_with_parent(config.agent)
    own = hand_over.interpreter()
    control = socket.socket(fileno=config.control)
    if config.probe:
        control.send(json.dumps({"held": True}).encode())
        os._exit(0)
    before = {number: signal.getsignal(number) for number in (*STOPPING, signal.SIGCHLD)}
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    name = _rename(NAME)
    server = ScriptForkserver(control, config, own)
    why = _shadowed_module(config.folder, initial_modules)
    if why:
        server.send({"error": why})
        os._exit(0)
    server.import_modules()
    forked = server.serve()
    if forked is None:
        os._exit(0)
    _rename(name)
    for number, handler in before.items():
        signal.signal(number, handler)
    if server.taken is not None:
        server.taken.apply()
    _separate_from_parent(server.modules)
    if forked.request.get("record"):
        sys.meta_path.insert(0, Recorder(config.modules))


class ScriptForkserver(Forkserver):
    """Server in a warm process that has imported a user's script's modules. It forks workers that run the script."""

    def __init__(self, control: socket.socket, config: ParentConfig, own: Mapping[str, Any]) -> None:
        """Prepare the server. `own` has the properties of this process's Python interpreter, such as its version."""
        super().__init__(control, self._refusal)
        self._config, self._own = config, own
        self._files: dict[str, tuple[int, ...]] = {}
        """Fingerprint of each imported file, keyed by path, to detect changes of the file."""
        self._environment_reads: set[bytes] = set()
        self.modules: list[Imported] = []
        """Modules that were imported or could not be imported."""
        self.taken: Optional[take_over.Signals] = None
        """Signals that the script's interpreter ignored and blocked, or None in a process that has not taken over a
        script."""

    def import_modules(self) -> None:
        """Import the modules that were recorded since the last call in the file that lists the script's modules.

        Afterwards, report to the agent that this process is warm.
        """
        known = {module.name for module in self.modules}
        learned = _modules_to_import(self._config, read(self._config.modules))
        modules = [module for module in learned if module.name not in known]
        self._environment_reads |= _preload(self._config, modules, self)
        self.modules += modules
        gc.collect()
        gc.freeze()
        self._files = _files()
        if self._config.script:
            self._files[self._config.script] = _fingerprint(self._config.script)
        packages = {module.package for module in self.modules}
        reads = sorted(map(os.fsdecode, self._environment_reads))
        self.send({"warm": True, "packages": len(packages), "reads": reads, "interpreter": self._own})

    def _handle(self, request: Mapping[str, Any], fds: Sequence[int]) -> bool:
        if "import" in request:
            self.import_modules()
            return False
        return super()._handle(request, fds)

    def _leave(self, parent: int, request: Mapping[str, Any], fds: Sequence[int]) -> None:
        if "take" not in request:
            return super()._leave(parent, request, fds)
        die_with_parent(parent)
        reset_signals()
        self.taken = take_over.take_over(request["take"], parent, fds)
        return None

    def _refusal(self) -> Mapping[str, str]:
        why = unfit()
        if why:
            return {"unfit": why}
        files = self._files.items()
        changed = next((path for path, fingerprint in files if _fingerprint(path) != fingerprint), None)
        return {} if changed is None else {"stale": changed}


def _separate_from_parent(modules: Iterable[Imported]) -> None:
    """Replace state of a forked worker, such as random seeds, that must differ between the forks of one parent."""
    importlib.invalidate_caches()
    threads = {name: value for module in modules for name, value in module.changes.items() if value is not None}
    blas.set_threads({**os.environ, **threads})
    _reseed()


def _reseed() -> None:
    """Reseed the random generators of numpy and torch that were seeded randomly when they were imported.

    If a package chose a seed on purpose during its import, the seed is kept. Python itself reseeds `random`.
    """
    if (numpy := sys.modules.get("numpy.random")) is not None and numpy.get_bit_generator()._seed_seq is not None:
        numpy.seed()
    torch = getattr(sys.modules.get("torch"), "default_generator", None)
    # A random seed has 64 bits. A seed that a user chose is most likely smaller.
    if torch is not None and torch.initial_seed() >= 1 << 32:
        torch.seed()


# --- imports ------------------------------------------------------------------------------------------------------


def _modules_to_import(config: ParentConfig, learned: Iterable[Imported]) -> list[Imported]:
    preloaded = [Imported(name) for name in config.preload]
    installed = [module for module in learned if _is_installed(module.package)]
    return [module for module in (*preloaded, *installed) if module.package not in config.left_out]


@functools.cache
def _is_installed(package: str) -> bool:
    """Return whether a package is in a folder of installed packages. Any other package is the script's own."""
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.machinery.PathFinder.find_spec(package, sys.path)
    locations = [] if spec is None else list(spec.submodule_search_locations or [spec.origin or ""])
    return any(_of_package(location) or _is_filled_by_pip(os.path.dirname(location)) for location in locations)


@functools.cache
def _is_filled_by_pip(folder: str) -> bool:
    """Return whether a folder contains records of installed packages, as after `pip install --target`."""
    with contextlib.suppress(OSError):
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    return False


def _preload(config: ParentConfig, modules: Iterable[Imported], server: Forkserver) -> set[bytes]:
    """Import modules, and return the names of the environment variables that the imports have read."""
    initial_environment = dict(os.environ)
    sys.path.insert(0, config.folder)
    changes: Optional[Mapping[str, Optional[str]]] = None
    try:
        with _EnvironmentReads() as environment_reads:
            for module in modules:
                if module.changes != changes:
                    changes = module.changes
                    _set_environment({**initial_environment, **changes, BLAS: "1"})
                _import(module, module.name in config.preload, server)
                why = _reason_to_leave_out(environment_reads, config)
                if why:
                    server.send({"leave_out": module.package, "why": why})
                    os._exit(0)
                if _own_memory() > config.most_memory:
                    server.send({"error": f"its imports need more than {config.most_memory >> 20} MiB of memory"})
                    os._exit(0)
    finally:
        sys.path.remove(config.folder)
        _set_environment(initial_environment)
        sys.stdout.flush()
        sys.stderr.flush()
    return environment_reads.names


def _import(module: Imported, is_requested: bool, server: Forkserver) -> None:
    try:
        importlib.import_module(module.name)
    except BaseException as error:  # the script will get the same error
        if is_requested:
            traceback.print_exc()
            server.send({"failed": module.name, "why": f"{type(error).__name__}: {error}"[:300]})


def _reason_to_leave_out(environment_reads: _EnvironmentReads, config: ParentConfig) -> str:
    """Return why the module that was imported last must not be imported before a fork, or "" if it may be."""
    varying = environment_reads.names & {name.encode() for name in config.varying}
    if varying:
        return f"it reads the variable {min(varying).decode()} when it is imported"
    return unfit()


class _EnvironmentReads(dict[bytes, bytes]):
    """Replacement for the data of `os.environ`, which records the names of the variables that are read."""

    def __init__(self) -> None:
        self._data: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
        super().__init__(self._data)
        self.names: set[bytes] = set()

    def __enter__(self) -> _EnvironmentReads:
        os.environ._data = self  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        self._data.clear()  # `os.environb` refers to the same data
        self._data.update(self)
        os.environ._data = self._data  # type: ignore[attr-defined]

    def __getitem__(self, name: bytes) -> bytes:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        if isinstance(name, bytes):
            self.names.add(name)
        return super().__contains__(name)


def _set_environment(variables: Mapping[str, Optional[str]]) -> None:
    for name in [name for name in os.environ if variables.get(name) is None]:
        del os.environ[name]
    for name, value in variables.items():
        _set_variable(name, value)


def _set_variable(name: str, value: Optional[str]) -> None:
    if value is not None:
        os.environ[name] = value
        return
    with contextlib.suppress(KeyError):
        del os.environ[name]


# --- properties of the parent -------------------------------------------------------------------------------


def _own_memory() -> int:
    with open("/proc/self/status") as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def _shadowed_module(folder: str, initial_modules: Iterable[str]) -> str:
    """Return an error message if a module of the script has the name of a module that only this package has imported.

    Such a script could not import its own module, because the name is already in `sys.modules`. Return "" if there is
    no conflict.
    """
    ours = {name for name in sys.modules if "." not in name} - set(initial_modules)
    with contextlib.suppress(OSError):
        for entry in sorted(os.listdir(folder)):
            name = entry.partition(".")[0]
            if name in ours and (entry == name or entry == f"{name}.py"):
                return f"{entry} beside the script has the name of a module of Python's standard library"
    return ""


def _files() -> dict[str, tuple[int, ...]]:
    """Return the fingerprints of the files of all imported modules, except those of the standard library."""
    standard = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
    fingerprints: dict[str, tuple[int, ...]] = {}
    for module in list(sys.modules.values()):
        path = _path(module)
        if path and len(fingerprints) < MOST_FILES and not (path.startswith(standard) and not _of_package(path)):
            fingerprints[path] = _fingerprint(path)
    return fingerprints


def _path(module: object) -> str:
    path = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
    return path if isinstance(path, str) and os.path.isabs(path) else ""


def _of_package(path: str) -> bool:
    return any(f"/{name}/" in path for name in PACKAGES)


def _fingerprint(path: str) -> tuple[int, ...]:
    """Return the time, size and inode of a file, or () if there is no such file."""
    try:
        stat = os.stat(path)
    except OSError:
        return ()
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)


def _rename(name: str) -> str:
    """Set the name under which `ps` shows this process, and return the previous name."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "r+") as file:
        before = file.read().rstrip("\n")
        file.seek(0)
        file.write(name)
        return before
    return name
