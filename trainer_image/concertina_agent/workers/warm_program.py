"""Warm parents of one program: processes that have imported the program's modules, and fork to run its scripts.

A parent is started with the program's own command line, and stops before the script begins (`hook`). It imports the
modules that the script's first run records, even while that run still imports (decision "Imports learned from a
script's first run"). If more modules are recorded later, they are imported in one of two ways: a parent without
children imports them, and a parent with children is replaced by a new one when no module has been added for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, TypeVar, Union

from concertina_agent.files.size import size_of
from concertina_agent.workers.child_processes import Reaper
from concertina_agent.workers.environment import VARYING
from concertina_agent.workers.hand_overs import Interpreter
from concertina_agent.workers.learned import lines_to_tell
from concertina_agent.workers.programs import Program, difference, differing_variable
from concertina_agent.workers.workers import Child, ForkRefused, Process, StartError, WorkerParent
from concertina_protocol.log import log_event
from concertina_protocol.waiting import within

VARIABLE = "CONCERTINA_WARM_PARENT"
"""Environment variable that makes a Python process a parent, which imports modules and forks.

The module `hook.sitecustomize` uses the same name.
"""
WARM_SECONDS = 120.0
"""Seconds from the start of a parent after which workers no longer wait for it."""
QUIET_SECONDS = 5.0
"""Seconds without a newly recorded module after which a parent process with children is replaced."""
MOST_PARENTS = 12
"""Maximum number of parent processes that are started for a program, one after another.

A new parent is started if the last one dies, must leave out a module, or has to import more modules.
"""
STORED = ".program"
"""Suffix of a file that stores a program for the next container."""
PARENT_ALONE = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Environment variables that only the parent process has, and not the workers that are forked from it.

With these variables, OpenBLAS starts no threads, which would prevent a fork, and PyTorch looks for GPUs without opening
any.
"""


AnyChild = TypeVar("AnyChild", bound=Child)


@dataclasses.dataclass(frozen=True)
class Again:
    """Result of a failed start of a worker. The caller must try again, because a new warm process is being prepared."""


class ScriptParent(WorkerParent):
    """Warm process of a program: it has imported the program's modules, and forks workers."""

    def __init__(self, program: Program, reaper: Reaper, size: int) -> None:
        """Prepare a warm process without starting it.

        `size` is the size of the file with the recorded modules at the time when the process begins to import them. If
        the file grows later, there are more modules to import.
        """
        super().__init__("what the script needs", reaper)
        self.program, self.size = program, size
        self.packages = 0
        """Number of packages that the parent process has imported."""
        self.reads: frozenset[str] = frozenset()
        """Names of the environment variables that the parent's imports have read."""
        self.interpreter: Mapping[str, Any] = {}
        """Properties of the parent's interpreter (see `hand_over.interpreter`)."""
        self.left_out: Optional[tuple[str, str]] = None
        """Package that must not be imported before a fork, with the reason, or None.

        If this field is set, the parent process has exited.
        """
        self.failed: dict[str, str] = {}
        """Modules of spec's `preload` that could not be imported, with the reason for each."""
        self.held = False
        """True if this process was started as a probe, and has reached the start hook before its script began."""
        self.lost = self.stale = False

    async def import_more(self, size: int) -> str:
        """Make the warm process import the modules that were added to the file of recorded modules.

        Return "" if the warm process has imported these modules, or the reason why it has exited.
        """
        if self._control is None:
            return "it has ended"
        self.size, self.warm = size, asyncio.get_running_loop().create_future()
        try:
            self._control.send(json.dumps({"import": True}).encode())
        except OSError as error:
            return str(error)
        return await asyncio.shield(self.warm)

    def _on_news(self, message: Mapping[str, Any]) -> None:
        if "failed" in message:
            self.failed[message["failed"]] = message["why"]
        elif "leave_out" in message:
            self.left_out, self.ending = (message["leave_out"], message["why"]), True
        elif "held" in message:
            self.held = self.ending = True
        else:
            self.packages = message.get("packages", 0)
            self.reads, self.interpreter = frozenset(message.get("reads", ())), message.get("interpreter", {})
            super()._on_news(message)

    def _on_loss(self) -> None:
        self.lost = True


class WarmProgram:
    """Program that workers run, its recorded modules, and the warm processes that have imported these modules."""

    def __init__(
        self,
        program: Program,
        folder: Path,
        base: Mapping[str, str],
        reaper: Reaper,
        preload: Sequence[str],
        memory: Callable[[], int],
    ) -> None:
        """Prepare warm starts of a program. No warm process is started yet.

        Args:
            program: The program.
            folder: Folder in which learned modules are stored for the next container.
            base: Environment variables of all workers. A stored program contains only the differences from these
                variables.
            reaper: Reaper of the agent's child processes.
            preload: Modules that a parent imports before any module has been learned.
            memory: Function that returns the maximum bytes of memory for the imports of a parent.
        """
        self.program, self._base, self._reaper, self._preload, self._memory = program, base, reaper, preload, memory
        self.modules, self._stored = folder / f"{program.key}.modules", folder / f"{program.key}{STORED}"
        """Files that store the learned modules and the program."""
        self.parent: Optional[ScriptParent] = None
        self._next: Optional[asyncio.Task[None]] = None
        """Task that starts a parent process, or that makes a parent process import more modules, or None."""
        self._retired: list[ScriptParent] = []
        self.left_out: dict[str, str] = {}
        self.learner: Optional[Process] = None
        """Worker whose imports are being recorded, or None.

        Imports are recorded as long as there is no parent process.
        """
        self._started = 0
        self._seen_size, self._quiet_since = 0, 0.0
        self._tried_size = 0
        """Size of the file of recorded modules when a parent process last failed to start or could not be used.

        The next parent process is started only when the file has grown.
        """
        self._failed_renewal = ""
        """Reason why no parent process with more modules could be started, or ""."""
        self.refused = ""
        """Reason why the last interpreter has run its script itself, or ""."""
        self.why = ""
        """Reason why there is no parent process, or "" if there is one."""

    @property
    def size(self) -> int:
        """Size in bytes of the file with the recorded modules. It grows when modules are added."""
        return size_of(self.modules)

    @property
    def importing(self) -> bool:
        return self._next is not None

    @property
    def learning(self) -> bool:
        """True if the program's first worker still runs, so that its imports are still being recorded.

        Meanwhile, other workers of that round do not wait for a warm process.
        """
        return self.learner is not None and not self.learner.ended.done()

    @property
    def dispensable(self) -> bool:
        """True if the program has no warm process, and a new warm process would have no modules to import."""
        return self.parent is None and not self.importing and self.size <= self._tried_size

    @property
    def skipped(self) -> list[str]:
        """Modules that the warm process has skipped, each with the reason why it can't be imported before a fork.

        Each worker imports these modules itself, in spite of its warm start.
        """
        if self.parent is None:
            return []
        reasons = {**self.parent.failed, **self.left_out}
        clauses = [f"{name} ({why})" for name, why in reasons.items()]
        return [*clauses, *([f"what the script imports ({self._failed_renewal})"] if self._failed_renewal else [])]

    @property
    def told(self) -> str:
        """Program and its recorded modules, as lines to send to another replica, or "" if no modules are recorded."""
        if self.parent is None or self.parent.size == 0:
            return ""
        return f"{self.parent.program.to_json(self._base, self.parent.reads)}\n{lines_to_tell(str(self.modules))}"

    def _store(self) -> None:
        """Store the program in the volume, so that a restarted agent can start a warm process for it."""
        with contextlib.suppress(OSError), open(self._stored, "w", opener=_private) as file:
            file.write(self.program.to_json(self._base))

    # --- parents ------------------------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Start the import of newly recorded modules, and stop parent processes that are no longer needed."""
        for parent in [parent for parent in self._retired if parent.idle]:
            parent.stop()
            self._retired.remove(parent)
        size = self.size
        if size != self._seen_size:
            self._seen_size, self._quiet_since = size, now
        if self.parent is not None and self.parent.lost and self._started < MOST_PARENTS:
            self.renew()
        if size <= (self._tried_size if self.parent is None else self.parent.size):
            return
        if self.parent is None or self.parent.idle or now >= self._quiet_since + QUIET_SECONDS:
            self.renew()

    def renew(self) -> None:
        """Make a warm process import the newly recorded modules.

        A warm process with children is not changed. A new warm process is started instead.
        """
        if self._next is None:
            self._next = asyncio.ensure_future(self._renew())

    async def settled(self) -> None:
        """Wait until no parent process of this program is importing modules."""
        if self._next is not None:
            await asyncio.wait({self._next})

    def adopt(self, program: Program) -> None:
        """Replace the warm process by a new one for `program`.

        The interpreter of `program` differs in a property from the interpreter of the present program, so forks of the
        present process can't run it.
        """
        self.program, self._tried_size = program, 0
        if self.parent is not None:
            self._retired.append(self.parent)
            self.parent = None

    def stop(self) -> None:
        if self._next is not None:
            self._next.cancel()
        for parent in (self.parent, *self._retired):
            if parent is not None:
                parent.stop()

    async def _renew(self) -> None:
        try:
            before, program = self.parent, self.program
            if (
                before is not None
                and before.idle
                and not (before.lost or before.stale)
                and not await self._more(before)
            ):
                return
            parent, why = await self._warm_parent(program)
            log_event("script_parent", learned=parent.size if parent else None, left_out=self.left_out, why=why)
            if parent is None:
                self._tried_size = self.size
            if parent is None and before is not None and not before.ending and not (before.lost or before.stale):
                # The present parent lacks some modules, but is better than no parent.
                before.size, self._failed_renewal = self.size, why
                return
            if before is not None:
                self._retired.append(before)
            self.parent, self.why, self._failed_renewal = parent, why, ""
            if parent is not None and parent.packages == 0:  # without imports, a start takes no longer than a fork
                self._retired.append(parent)
                self.parent, self._tried_size = None, parent.size
            elif parent is not None:
                self._store()
        finally:
            self._next = None

    async def _more(self, parent: ScriptParent) -> str:
        """Make a warm process import more modules, and return "".

        If the process has exited instead, return the reason.
        """
        why = await parent.import_more(self.size)
        if not why:
            log_event("script_parent", learned=parent.size, left_out=self.left_out, why="")
        else:
            self._leave_out(parent)
        return why

    def _leave_out(self, parent: ScriptParent) -> None:
        if parent.left_out is not None:
            package, why = parent.left_out
            log_event("left_out", package=package, why=why)
            self.left_out[package] = why

    async def _warm_parent(self, program: Program) -> tuple[Optional[ScriptParent], str]:
        while self._started < MOST_PARENTS:
            self._started += 1
            parent = ScriptParent(program, self._reaper, self.size)
            try:
                parent.begin(lambda control: self._line(control, program.line), program.directory)
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
            self._leave_out(parent)
        reasons = "; ".join(f"{package}: {why}" for package, why in self.left_out.items())
        return None, (
            f"{MOST_PARENTS} processes have imported the modules of the script, and none could be used ({reasons})"
        )

    async def probe(self, options: int) -> str:
        """Return "" if an interpreter of the program can wait for the agent before its script, otherwise the reason.

        To find out, the method starts the interpreter once, with an empty script.

        Args:
            options: Number of words of the command line before the program.
        """
        probe = ScriptParent(self.program, self._reaper, 0)
        line = [*self.program.line[:options], "-c", "pass"]
        try:
            probe.begin(lambda control: self._line(control, line, probe=True), self.program.directory)
            await within(WARM_SECONDS, asyncio.shield(probe.warm))
        except StartError as error:
            return str(error)
        except asyncio.TimeoutError:
            probe.stop()
            return f"{line[0]} does not start"
        return "" if probe.held else f"{line[0]} is older than Python 3.9, or does not import sitecustomize"

    def _line(self, control: int, line: Sequence[str], probe: bool = False) -> tuple[Sequence[str], Mapping[str, str]]:
        config = {
            "agent": os.getpid(),
            "control": control,
            "probe": probe,
            "folder": self.program.folder,
            "script": self.program.script,
            "modules": str(self.modules),
            "preload": self._preload,
            "left_out": tuple(self.left_out),
            "varying": VARYING,
            "most_memory": self._memory(),
        }
        return line, {**self.program.environment, **PARENT_ALONE, VARIABLE: json.dumps(config)}

    # --- forks --------------------------------------------------------------------------------------------------------

    async def fork(
        self, parent: ScriptParent, environment: Mapping[str, str], record: bool, prefix: str
    ) -> Union[Process, Again, str]:
        """Fork a worker whose command is this program, and return its process.

        If the caller has to repeat the call, the result is Again. If no worker can be forked, the result is the reason.
        """
        if record and parent.size == 0 and self.size > 0 and self._started < MOST_PARENTS:
            # The previous run ended before its modules were imported. Import them once here, rather than in each
            # worker.
            self.renew()
            return Again()
        return await self._forked(parent, parent.fork({"environment": environment, "record": record}, (), prefix))

    async def take_over(self, parent: ScriptParent, interpreter: Interpreter, record: str) -> Union[Child, Again, str]:
        """Fork a process that takes over the script of an interpreter, and return the process.

        If the caller has to repeat the call, the result is Again. If no process can be forked, the result is the
        reason.
        """
        request = {"take": {**interpreter.report, "record": record}, "record": bool(record)}
        return await self._forked(parent, parent.fork_for_interpreter(request, interpreter.fds))

    async def _forked(
        self, parent: ScriptParent, fork: Awaitable[Union[AnyChild, ForkRefused]]
    ) -> Union[AnyChild, Again, str]:
        """Wait for a requested fork, and return the child process.

        If the caller has to repeat the request, the result is Again. If the fork was refused or failed, the result is
        the reason.
        """
        try:
            forked = await fork
        except StartError as error:
            forked = ForkRefused(str(error), changed="it" if parent.lost else "")
        return self._again(parent, forked) if isinstance(forked, ForkRefused) else forked

    def unlike(self, parent: ScriptParent, report: Mapping[str, Any]) -> str:
        """Return why forks of a warm process cannot take over the script of an interpreter, or "" if they can."""
        if name := difference(report["interpreter"], parent.interpreter):
            return f"its {name} differs from that of the warm process"
        if name := differing_variable(report["environment"], parent.program.environment, parent.reads):
            return (
                f"its variable {name} differs from that of the warm process, and is read before the "
                "script can change it"
            )
        return ""

    def _again(self, parent: ScriptParent, refused: ForkRefused) -> Union[Again, str]:
        if not refused.changed or self._started >= MOST_PARENTS:
            return refused.why
        log_event("imported_again", why=refused.why)
        parent.stale = True
        if refused.changed == self.program.script:
            # If the script has changed, its imports, and the variables that it sets before them, may have changed too.
            self.modules.unlink(missing_ok=True)
        self.renew()
        return Again()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
