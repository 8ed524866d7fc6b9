"""Start of a user's own command as a fork of a parent that has imported its modules, or without a parent if needed.

The parent is the command itself, stopped before its script begins (`hook`). At first it has imported the modules that
`preload` names. Its children record their imports. Once no new ones are recorded, another parent that has imported all
of them replaces it (decision "What a script imports is learned from its first run").
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

import concertina_protocol as p
from concertina_agent.files.size import size_of
from concertina_agent.settings import HOOK, AgentSettings
from concertina_agent.workers.child_processes import Reaper
from concertina_agent.workers.environment import VARYING, worker_defaults
from concertina_agent.workers.learned import lines_to_tell
from concertina_agent.workers.python_command import PythonCommand, Runs, Unsuited, parse
from concertina_agent.workers.worker_memory import container_memory
from concertina_agent.workers.workers import ForkRefused, Process, StartError, WorkerParent
from concertina_protocol.log import log_event
from concertina_protocol.waiting import within

VARIABLE = "CONCERTINA_WARM_PARENT"
"""Name of the variable, as in `hook`, which only the command's Python imports."""
WARM_SECONDS = 120.0
"""Seconds from the start of a parent after which no worker waits for it."""
QUIET_SECONDS = 5.0
"""Seconds without a new module after which a script has imported the modules that it needs."""
MEMORY_SHARE = 4
"""Divisor of the container's memory for the maximum that the imports of a parent may take.

Until the last worker of the previous parent has ended, there are two parents beside the training processes.
"""
MOST_PARENTS = 12
"""Maximum number of parents that an agent starts.

A parent that is lost, has to leave out a module, or has learned more modules is followed by another.
"""
MOST_TOLD = 1 << 20
"""Maximum number of characters of learned modules that are sent to another replica."""
MOST_CHARACTERS = 1000
"""Maximum number of characters of a message about the parent."""
BEFORE_MAIN = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OMP_", "MKL_", "KMP_", "GOMP_")
"""Prefixes of variables that are read before a script can change them."""
SHELL_STARTS = ("BASH_ENV", "ENV", "BASH_FUNC_")
"""Prefixes and names of variables that make a shell run more than its command."""


@dataclasses.dataclass(frozen=True)
class Again:
    """Result of a start that has to be repeated, because another parent is being warmed."""


class ScriptParent(WorkerParent):
    """One parent of scripts."""

    def __init__(self, reaper: Reaper, size: int) -> None:
        """Initialize the parent; `size` is that of the file of learned modules when the parent began to import."""
        super().__init__("what the script needs", reaper)
        self.size = size
        self.left_out: Optional[tuple[str, str]] = None
        """Package that the parent must not import, with the reason. The parent has then ended."""
        self.failed: dict[str, str] = {}
        """Modules of `preload` that could not be imported, with the reason for each."""
        self.held = False
        """Whether this was a probe that reached the hook."""
        self.lost = self.stale = False

    def _on_news(self, message: Mapping[str, Any]) -> None:
        if "failed" in message:
            self.failed[message["failed"]] = message["why"]
        elif "leave_out" in message:
            self.left_out, self.ending = (message["leave_out"], message["why"]), True
        elif "held" in message:
            self.held = self.ending = True
        else:
            super()._on_news(message)

    def _on_loss(self) -> None:
        self.lost = True


class WarmProcess:
    """Start of workers as forks of a parent."""

    def __init__(self, command: PythonCommand, settings: AgentSettings, reaper: Reaper) -> None:
        self._command, self._preload, self._reaper = command, settings.preload, reaper
        self._environment = {
            **worker_defaults(settings.workers),
            **settings.environment,
            **_shell_variables(command.shell),
        }
        self._learned = settings.volume / "warm" / "modules"
        """File of the learned modules in the volume, so that the next container can use it, too."""
        self._script = os.path.realpath(command.target) if command.runs is Runs.FILE else ""
        self._parent: Optional[ScriptParent] = None
        self._next: Optional[asyncio.Task[None]] = None
        """Task that starts another parent."""
        self._retired: list[ScriptParent] = []
        self._left_out: dict[str, str] = {}
        self._started = 0
        self._size, self._quiet_since = 0, 0.0
        self._failed_renewal = ""
        """Reason why there is no newer parent that would have imported more modules."""
        self.why = ""
        """Reason why the command starts without a parent, in a sentence, or empty if it starts warm."""

    # --- a parent -----------------------------------------------------------------------------------------------------

    @property
    def imports_first(self) -> bool:
        """Whether there are modules to import before the first start.

        If there are none, a replica is ready without a parent. Its first start waits for a parent that is warm by then,
        or nearly.
        """
        return bool(self._preload) or self.has_learned

    @property
    def has_learned(self) -> bool:
        """Whether modules were learned, from a worker that was started here or from another replica."""
        return size_of(self._learned) > 0

    @property
    def learned(self) -> Optional[p.Learned]:
        """Modules that the parent has imported, or None if there are none."""
        if self._parent is None or self._parent.size == 0:
            return None
        modules = lines_to_tell(str(self._learned))
        return p.Learned(modules, self._left_out) if len(modules) <= MOST_TOLD else None

    async def take(self, learned: p.Learned) -> None:
        """Import the modules that another replica has learned, and return once they are imported or cannot be.

        The caller ensures that this replica has learned none.
        """
        try:
            self._learned.write_bytes(learned.modules.encode(errors="replace"))
        except OSError as error:
            log_event("learned_nothing", why=str(error))
            return
        self._left_out.update(learned.left_out)
        await self.settled()
        if self._parent is not None:  # otherwise no fork is possible here
            self._renew()
            await self.settled()

    @property
    def warm_start_skipped_modules(self) -> str:
        """Modules that each worker has to import although it starts warm, with the reasons, or empty."""
        if self._parent is None:
            return ""
        reasons = {**self._parent.failed, **self._left_out}
        clauses = [f"{name} ({why})" for name, why in reasons.items()]
        if self._failed_renewal:
            clauses.append(f"what the script imports ({self._failed_renewal})")
        return "; ".join(clauses)[:MOST_CHARACTERS]

    def begin(self) -> None:
        """Start the first parent; `settled` returns once forks are possible, or are known to be impossible."""
        self._next = asyncio.ensure_future(self._start_first())

    async def _start_first(self) -> None:
        try:
            self._learned.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.why = f"{self._learned.parent} can't be made: {error.strerror}"
        else:
            self.why = _unlike_a_shell(self._command, self._environment) or await self._probe()
        if self.why:
            self._next = None
        else:
            await self._replace_parent()

    def look(self) -> None:
        """Check a few times a second for new modules to import, and stop parents that are no longer needed."""
        for parent in [parent for parent in self._retired if parent.idle]:
            parent.stop()
            self._retired.remove(parent)
        size, now = size_of(self._learned), asyncio.get_running_loop().time()
        if size != self._size:
            self._size, self._quiet_since = size, now
        elif self._parent is not None and size > self._parent.size and now >= self._quiet_since + QUIET_SECONDS:
            self._renew()

    def stop(self) -> None:
        if self._next is not None:
            self._next.cancel()
        for parent in (self._parent, *self._retired):
            if parent is not None:
                parent.stop()

    def _renew(self) -> None:
        if self._next is None:
            self._next = asyncio.ensure_future(self._replace_parent())

    async def settled(self) -> None:
        """Wait until no parent is being warmed."""
        if self._next is not None:
            await asyncio.wait({self._next})

    async def _replace_parent(self) -> None:
        """Start a parent that replaces the current one, if any."""
        try:
            parent, why = await self._warm_parent()
            log_event("script_parent", learned=parent.size if parent else None, left_out=self._left_out, why=why)
            before = self._parent
            if parent is None and before is not None and not (before.lost or before.stale):
                # The current parent lacks modules, but is better than none.
                before.size, self._failed_renewal = size_of(self._learned), why
                return
            if before is not None:
                self._retired.append(before)
            self._parent, self.why, self._failed_renewal = parent, why, ""
        finally:
            self._next = None

    async def _warm_parent(self) -> tuple[Optional[ScriptParent], str]:
        while self._started < MOST_PARENTS:
            self._started += 1
            parent = ScriptParent(self._reaper, size_of(self._learned))
            try:
                parent.begin(lambda control: self._line(control, self._command.line))
                error = await within(WARM_SECONDS, asyncio.shield(parent.warm))
            except StartError as failed:
                return None, str(failed)
            except asyncio.TimeoutError:
                parent.stop()
                return None, f"its imports take longer than {WARM_SECONDS:.0f} s"
            if not error:
                return parent, ""
            if parent.left_out is None:
                return None, error
            package, why = parent.left_out
            log_event("left_out", package=package, why=why)
            self._left_out[package] = why
        reasons = "; ".join(f"{package}: {why}" for package, why in self._left_out.items())
        return None, f"{MOST_PARENTS} processes have imported what the script needs, and none was of use ({reasons})"

    async def _probe(self) -> str:
        """Return the reason why this Python cannot be stopped before its script, or an empty string if it can."""
        probe = ScriptParent(self._reaper, 0)
        line = [*self._command.line[: self._command.options], "-c", "pass"]
        try:
            probe.begin(lambda control: self._line(control, line, probe=True))
            await within(WARM_SECONDS, asyncio.shield(probe.warm))
        except StartError as error:
            return str(error)
        except asyncio.TimeoutError:
            probe.stop()
            return f"{line[0]} does not start"
        return "" if probe.held else f"{line[0]} is older than Python 3.9, or does not import sitecustomize"

    def _line(self, control: int, line: Sequence[str], probe: bool = False) -> tuple[Sequence[str], Mapping[str, str]]:
        path = self._environment.get("PYTHONPATH")
        config = {
            "agent": os.getpid(),
            "control": control,
            "python_path": path,
            "probe": probe,
            "folder": _folder(self._command),
            "script": self._script,
            "modules": str(self._learned),
            "preload": self._preload,
            "left_out": tuple(self._left_out),
            "varying": VARYING,
            "most_memory": container_memory() // MEMORY_SHARE,
        }
        environment = {
            **self._environment,
            **PARENT_ALONE,
            "PYTHONPATH": f"{HOOK}{os.pathsep}{path}" if path else HOOK,
            VARIABLE: json.dumps(config),
        }
        return line, environment

    # --- a worker -----------------------------------------------------------------------------------------------------

    async def start(self, environment: Mapping[str, str], record: bool, prefix: str) -> Union[Process, Again, str]:
        """Start a worker, and return its process, or the reason why there is none.

        `record` is set if the worker records its imports.
        """
        environment = {**environment, **_shell_variables(self._command.shell)}
        if unlike := _differing_variable(environment, self._environment):
            return f"{unlike} differs from worker to worker, and is read before a script begins"
        request = {"environment": environment, "record": record}
        if self._parent is None:
            return self.why
        if record and self._parent.size == 0 and self.has_learned and self._started < MOST_PARENTS:
            # The previous run ended within QUIET_SECONDS. Import its modules once instead of in each worker.
            self._renew()
            return Again()
        try:
            forked = await self._parent.fork(request, (), prefix)
        except StartError as error:
            forked = ForkRefused(str(error), changed="it" if self._parent.lost else "")
        if isinstance(forked, ForkRefused) and forked.changed and self._started < MOST_PARENTS:
            log_event("imported_again", why=forked.why)
            self._parent.stale = True
            if forked.changed == self._script:
                # The script's imports, and the variables that it sets before them, may have changed.
                self._learned.unlink(missing_ok=True)
            self._renew()
            return Again()
        return forked.why if isinstance(forked, ForkRefused) else forked


PARENT_ALONE = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Variables of the parent only: with one thread it can be forked, and checking for GPUs must not open them."""


def warm_start(settings: AgentSettings, reaper: Reaper) -> Union[WarmProcess, str]:
    """Return the parent's controller, or the reason why a warm start is not possible."""
    parsed = parse(settings.command)
    return parsed.why if isinstance(parsed, Unsuited) else WarmProcess(parsed, settings, reaper)


def _folder(command: PythonCommand) -> str:
    """Return the folder that Python puts at the beginning of its path."""
    if command.runs is not Runs.FILE:
        return os.getcwd()
    return os.path.dirname(os.path.realpath(command.target))


def _shell_variables(shell: Optional[str]) -> dict[str, str]:
    """Return the variables that a shell sets when it only runs a command."""
    if shell is None:
        return {}
    return {"PWD": os.getcwd(), **({"SHLVL": "0"} if shell == "bash" else {})}


def _unlike_a_shell(command: PythonCommand, environment: Mapping[str, str]) -> str:
    if command.shell is None:
        return ""
    name = next((name for name in environment if name.startswith(SHELL_STARTS[2]) or name in SHELL_STARTS), None)
    return f"the variable {name} makes the shell do more than its text says" if name else ""


def _differing_variable(variables: Mapping[str, str], other_variables: Mapping[str, str]) -> str:
    names = [name for name in (*variables, *other_variables) if name.startswith(BEFORE_MAIN)]
    return next((name for name in names if variables.get(name) != other_variables.get(name)), "")
