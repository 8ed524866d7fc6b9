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
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

import concertina_protocol as p
from concertina_agent.files.size import size_of
from concertina_agent.settings import AgentSettings
from concertina_agent.workers.child_processes import Reaper
from concertina_agent.workers.environment import VARYING, worker_defaults
from concertina_agent.workers.hand_overs import MOST_PATH, HandOvers, Start, launched
from concertina_agent.workers.learned import lines_to_tell
from concertina_agent.workers.programs import Program, differing_variable, guess, of_command, reported, unlike
from concertina_agent.workers.python_command import PythonCommand, is_python, parse
from concertina_agent.workers.worker_memory import container_memory
from concertina_agent.workers.workers import SEARCH_PATH, ForkRefused, Process, StartError, WorkerParent, start_command
from concertina_protocol.log import log_event
from concertina_protocol.waiting import within

HOOK = os.path.join(SEARCH_PATH, "concertina_agent", "workers", "hook")
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
NO_REPORT = "no Python of the command reads PYTHONPATH and imports sitecustomize in the worker's session"


@dataclasses.dataclass(frozen=True)
class Again:
    """Result of a start that has to be repeated, because another parent is being warmed."""


class ScriptParent(WorkerParent):
    """One parent of scripts."""

    def __init__(self, program: Program, reaper: Reaper, size: int) -> None:
        """Initialize the parent; `size` is that of the file of learned modules when the parent began to import."""
        super().__init__("what the script needs", reaper)
        self.program, self.size = program, size
        self.left_out: Optional[tuple[str, str]] = None
        """Package that the parent must not import, with the reason. The parent has then ended."""
        self.failed: dict[str, str] = {}
        """Modules of `preload` that could not be imported, with the reason for each."""
        self.held = False
        """Whether this was a probe that reached the hook."""
        self.interpreter: Mapping[str, Any] = {}
        """Properties of the parent's interpreter (`hand_over.interpreter`)."""
        self.lost = self.stale = False

    def _on_news(self, message: Mapping[str, Any]) -> None:
        if "failed" in message:
            self.failed[message["failed"]] = message["why"]
        elif "leave_out" in message:
            self.left_out, self.ending = (message["leave_out"], message["why"]), True
        elif "held" in message:
            self.held = self.ending = True
        else:
            self.interpreter = message.get("interpreter", {})
            super()._on_news(message)

    def _on_loss(self) -> None:
        self.lost = True


class WarmProcess:
    """Start of workers as forks of a parent."""

    def __init__(self, settings: AgentSettings, reaper: Reaper) -> None:
        self._line, self._preload, self._reaper = settings.command, settings.preload, reaper
        environment = {**worker_defaults(settings.workers), **settings.environment}
        command = parse(settings.command)
        self.is_python = isinstance(command, PythonCommand)
        """Whether the command is only Python. A fork then runs it without another interpreter's start."""
        self._no_report = NO_REPORT
        """Reason why no interpreter of the command reports."""
        if not isinstance(command, PythonCommand) and is_python(settings.command[0]):
            self._no_report = command.why
        self._program = (
            of_command(command, environment)
            if isinstance(command, PythonCommand)
            else guess(settings.command, environment)
        )
        """Program of the parent, or None until an interpreter has reported it."""
        self._learned = settings.volume / "warm" / "modules"
        """File of the learned modules in the volume, so that the next container can use it, too."""
        self._hand_overs = HandOvers(str(settings.volume / "warm" / "socket"), self._decide, self._refused)
        self._parent: Optional[ScriptParent] = None
        self._next: Optional[asyncio.Task[None]] = None
        """Task that starts another parent."""
        self._retired: list[ScriptParent] = []
        self._left_out: dict[str, str] = {}
        self._started = 0
        self._size, self._quiet_since = 0, 0.0
        self._failed_renewal = ""
        """Reason why there is no newer parent that would have imported more modules."""
        self._failed_size = 0
        """Size of the file of learned modules when the last parent failed that would have imported them."""
        self.why_plain = ""
        """Reason why the last interpreter of a worker did not hand itself over, or empty."""
        self.why = ""
        """Reason why the command starts without a parent, in a sentence, or empty if it starts warm."""

    # --- a parent -----------------------------------------------------------------------------------------------------

    @property
    def imports_first(self) -> bool:
        """Whether there are modules to import before the first start.

        If there are none, a replica is ready without a parent. Its first start waits for a parent that is warm by then,
        or nearly.
        """
        return self._program is not None and (bool(self._preload) or self.has_learned)

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
            self.why = "" if self.is_python else self._listen()
            if self._program is not None and not self.why:
                self.why = await self._probe(self._program)
        if self.why or self._program is None:
            self._next = None
        else:
            await self._replace_parent()

    def _listen(self) -> str:
        """Begin to listen for interpreters that hand themselves over, and return the reason why that is impossible."""
        if len(os.fsencode(self._hand_overs.path)) > MOST_PATH:
            return f"the path {self._hand_overs.path} is too long for a socket"
        try:
            self._hand_overs.begin()
        except OSError as error:
            return f"{self._hand_overs.path} can't be made: {error.strerror}"
        return ""

    def look(self) -> None:
        """Check a few times a second for new modules to import, and stop parents that are no longer needed."""
        for parent in [parent for parent in self._retired if parent.idle]:
            parent.stop()
            self._retired.remove(parent)
        size, now = size_of(self._learned), asyncio.get_running_loop().time()
        if size != self._size:
            self._size, self._quiet_since = size, now
        elif self._lacks(size) and now >= self._quiet_since + QUIET_SECONDS:
            self._renew()

    def _lacks(self, size: int) -> bool:
        """Return whether a parent could import more than there is imported."""
        if self._parent is not None:
            return size > self._parent.size
        return self._program is not None and self._program.reported and size > self._failed_size

    def stop(self) -> None:
        self._hand_overs.close()
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
            program = self._program
            assert program is not None
            parent, why = await self._warm_parent(program)
            log_event("script_parent", learned=parent.size if parent else None, left_out=self._left_out, why=why)
            if parent is None:
                self._failed_size = size_of(self._learned)
            before = self._parent
            if parent is None and before is not None and not (before.lost or before.stale):
                # The current parent lacks modules, but is better than none.
                before.size, self._failed_renewal = size_of(self._learned), why
                return
            if before is not None:
                self._retired.append(before)
            self._parent, self.why, self._failed_renewal = parent, why, ""
            if self._program is None or self._program.line != program.line:  # reported meanwhile
                self._retire()
        finally:
            self._next = None

    async def _warm_parent(self, program: Program) -> tuple[Optional[ScriptParent], str]:
        while self._started < MOST_PARENTS:
            self._started += 1
            parent = ScriptParent(program, self._reaper, size_of(self._learned))
            try:
                parent.begin(lambda control: self._parent_line(program, control, program.line), program.directory)
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

    async def _probe(self, program: Program) -> str:
        """Return the reason why this Python cannot be stopped before its script, or an empty string if it can."""
        probe = ScriptParent(program, self._reaper, 0)
        line = [*program.line[: program.options], "-c", "pass"]
        try:
            probe.begin(lambda control: self._parent_line(program, control, line, probe=True), program.directory)
            await within(WARM_SECONDS, asyncio.shield(probe.warm))
        except StartError as error:
            return str(error)
        except asyncio.TimeoutError:
            probe.stop()
            return f"{line[0]} does not start"
        return "" if probe.held else f"{line[0]} is older than Python 3.9, or does not import sitecustomize"

    def _parent_line(
        self, program: Program, control: int, line: Sequence[str], probe: bool = False
    ) -> tuple[Sequence[str], Mapping[str, str]]:
        path = program.environment.get("PYTHONPATH")
        config = {
            "agent": os.getpid(),
            "control": control,
            "python_path": path,
            "probe": probe,
            "folder": program.folder,
            "script": program.script,
            "modules": str(self._learned),
            "preload": self._preload,
            "left_out": tuple(self._left_out),
            "varying": VARYING,
            "most_memory": container_memory() // MEMORY_SHARE,
        }
        environment = {
            **program.environment,
            **PARENT_ALONE,
            "PYTHONPATH": _with_hook(path),
            VARIABLE: json.dumps(config),
        }
        return line, environment

    # --- a worker -----------------------------------------------------------------------------------------------------

    async def start(self, environment: Mapping[str, str], record: bool, prefix: str) -> Union[Process, Again, str]:
        """Start a worker, and return its process, or the reason why there is none.

        `record` is set if the worker records its imports.
        """
        if not self.is_python:
            return await self._start_launched(environment, record, prefix)
        assert self._program is not None
        if differing := differing_variable(environment, self._program.environment):
            return f"{differing} differs from worker to worker, and is read before a script begins"
        if self._parent is None:
            return self.why
        return await self._fork(self._parent, {"environment": environment, "record": record}, record, prefix)

    async def _fork(
        self, parent: ScriptParent, request: Mapping[str, Any], record: bool, prefix: str, fds: tuple[int, ...] = ()
    ) -> Union[Process, Again, str]:
        if record and parent.size == 0 and self.has_learned and self._started < MOST_PARENTS:
            # The previous run ended within QUIET_SECONDS. Import its modules once instead of in each worker.
            self._renew()
            return Again()
        try:
            forked = await parent.fork(request, fds, prefix)
        except StartError as error:
            forked = ForkRefused(str(error), changed="it" if parent.lost else "")
        if isinstance(forked, ForkRefused) and forked.changed and self._started < MOST_PARENTS:
            log_event("imported_again", why=forked.why)
            parent.stale = True
            if self._program is not None and forked.changed == self._program.script:
                # The script's imports, and the variables that it sets before them, may have changed.
                self._learned.unlink(missing_ok=True)
            self._renew()
            return Again()
        return forked.why if isinstance(forked, ForkRefused) else forked

    async def _start_launched(
        self, environment: Mapping[str, str], record: bool, prefix: str
    ) -> Union[Process, Again, str]:
        """Start a command whose interpreter hands itself over to a fork of the parent."""
        if self._hand_overs.closed:
            self._refused(self.why)
            return self.why
        variables = {
            **environment,
            "PYTHONPATH": _with_hook(environment.get("PYTHONPATH")),
            SOCKET_VARIABLE: self._hand_overs.path,
        }
        if self._parent is None and record and self.has_learned and self._lacks(size_of(self._learned)):
            self._renew()
            return Again()
        if self._parent is not None:
            own_end, host_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            own_end.setblocking(False)
            with host_end:
                request = {"environment": environment, "host": True}
                process = await self._fork(self._parent, request, record, prefix, (host_end.fileno(),))
            if isinstance(process, Process):
                self._add(Start(process.session, record, own_end), process)
                try:
                    process.pid = await launched(own_end, self._line, variables)
                except StartError:
                    process.send_signal(signal.SIGKILL)
                    raise
                self._hand_overs.watch(own_end)
                return process
            own_end.close()
            if isinstance(process, Again):
                return process
            self._refused(process)
        process = start_command(self._line, variables, self._reaper, prefix)
        self._add(Start(process.session, record), process)
        return process

    def _add(self, start: Start, process: Process) -> None:
        self._hand_overs.add(start, process)
        process.ended.add_done_callback(lambda _: self._ended(start))

    def _ended(self, start: Start) -> None:
        if not start.reports:
            self._refused(self._no_report)

    def _refused(self, why: str) -> None:
        """Remember the reason why an interpreter starts its script itself."""
        self.why_plain = why

    def _decide(self, start: Start, report: dict[str, Any]) -> Mapping[str, Any]:
        """Return the answer to an interpreter's report, or an empty mapping if the start's host takes it over."""
        found, pid = reported(report), report["pid"]
        known = self._program
        if start.record and (
            known is None or not known.reported or (start.adopted and not os.path.exists(f"/proc/{start.adopted}"))
        ):
            # Of several interpreters, such as one that prepares data first, the last one is the script's.
            start.adopted, self._program = pid, found
            if known is not None and known.reported and known.line != found.line:
                self._learned.unlink(missing_ok=True)
                self._retire()
            known = found
        same = known is not None and known.line == found.line
        answer = {"record": str(self._learned) if start.record and same else ""}
        if self._parent is None or start.host is None:
            return answer
        self.why_plain = unlike(report, self._parent.program, self._parent.interpreter)
        if self.why_plain and same and self._parent.program is not known:
            self._retire()  # it was started from a guess
        return answer if self.why_plain else {}

    def _retire(self) -> None:
        """Start nothing from the current parent any more."""
        if self._parent is not None:
            self._retired.append(self._parent)
            self._parent = None


SOCKET_VARIABLE = "CONCERTINA_WARM_SOCKET"
"""Name of the variable of the socket, as in `hook`."""
PARENT_ALONE = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Variables of the parent only: with one thread it can be forked, and checking for GPUs must not open them."""


def _with_hook(path: Optional[str]) -> str:
    return f"{HOOK}{os.pathsep}{path}" if path else HOOK
