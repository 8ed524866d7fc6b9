"""Warm start of a user's own command: scripts run in forks of processes that have already imported their modules.

The command itself is started unchanged. An environment variable has the path of the agent's socket. Each Python
interpreter that the command starts connects to this socket and describes itself (`hand_over`). If a warm parent of the
same program has the same properties, a fork of that parent takes over the interpreter's script. Otherwise the script
runs in the interpreter, and its imports are recorded for the program's next parent (`warm_program`).

If the command only runs Python, no interpreter is started at all: once the program is known, the worker is a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
from collections.abc import Iterator, Mapping
from typing import Optional, Union

import concertina_protocol as p
from concertina_agent.settings import AgentSettings
from concertina_agent.workers.child_processes import Reaper
from concertina_agent.workers.environment import worker_defaults
from concertina_agent.workers.hand_over import VARIABLE
from concertina_agent.workers.hand_overs import HandOvers, Interpreter, Plain, Taken
from concertina_agent.workers.programs import Program, differing_variable, from_json, of_command, reported
from concertina_agent.workers.python_command import PythonCommand, is_python, parse
from concertina_agent.workers.warm_program import STORED, Again, WarmProgram
from concertina_agent.workers.worker_memory import anonymous_memory, container_memory
from concertina_agent.workers.workers import Child, Process, start_command
from concertina_protocol.log import log_event

MEMORY_SHARE = 4
"""Divisor of the container's memory that gives the memory for the imports of all parent processes.

While workers of a replaced parent process still run, there are two parent processes besides the workers.
"""
MOST_PROGRAMS = 4
"""Maximum number of programs for which a parent process runs."""
MOST_TOLD = 1 << 20
"""Maximum number of characters of recorded modules that are sent to another replica."""
MOST_CHARACTERS = 1000
"""Maximum number of characters of a message about warm starts."""
MOST_ATTEMPTS = 3
"""Maximum number of parent processes that are started in order to take over the script of one interpreter."""
SILENT_SECONDS = 60.0
"""Seconds after which a command is reported to have no warm start if no Python interpreter has connected.

The interpreters of the command connect to the agent when they start.
"""
SILENT = (
    "the command starts no Python that can be used: CPython 3.9 or newer that reads PYTHONPATH "
    "and imports sitecustomize"
)


class WarmStart:
    """Warm start of a user's own command."""

    def __init__(self, settings: AgentSettings, reaper: Reaper) -> None:
        self._line, self._preload, self._reaper = settings.command, settings.preload, reaper
        self._environment = {**worker_defaults(settings.workers), **settings.environment}
        self._folder = settings.volume / "warm"
        """Folder in the volume with programs and their recorded modules, for warm starts in the next container."""
        self._programs: dict[str, WarmProgram] = {}
        self._hand_overs = HandOvers(str(self._folder / "socket"), self._decide)
        self._begun: Optional[asyncio.Task[None]] = None
        self._impossible = ""
        """Reason why no warm start is possible, or "" if it is possible."""
        self._silent = ""
        """Reason why the last worker had no warm start, or "".

        The field is set if none of the command's Python interpreters has connected to the agent.
        """

    @property
    def why(self) -> str:
        """Reason why workers have no warm start, or "" if they have a warm start or will have one."""
        if self._impossible or self._silent:
            return self._impossible or self._silent
        return next((reason for warm in self._programs.values() if (reason := warm.why or warm.refused)), "")

    @property
    def imports_first(self) -> bool:
        """True if there are modules to import before workers are started for the first time.

        Until these modules are imported, the replica is not ready.
        """
        return bool(self._preload and isinstance(parse(self._line), PythonCommand)) or any(
            self._folder.glob(f"*{STORED}")
        )

    @property
    def has_learned(self) -> bool:
        """True if the modules of the script are known, from a worker of this replica or from another replica."""
        return any(warm.size > 0 for warm in self._programs.values())

    @property
    def learned(self) -> Optional[p.Learned]:
        """Modules that this replica's warm processes have imported, as a message for another replica, or None.

        None if no modules are known.
        """
        text = "".join(warm.told for warm in self._programs.values())
        left_out = {name: why for warm in self._programs.values() for name, why in warm.left_out.items()}
        return p.Learned(text, left_out) if 0 < len(text) <= MOST_TOLD else None

    async def take(self, learned: p.Learned) -> None:
        """Make warm processes import the modules that another replica has recorded.

        The method returns when the imports have succeeded or failed. Call it only if this replica has recorded no
        modules itself.
        """
        for program, lines in self._sections(learned.modules):
            warm = self._add(program)
            warm.left_out.update(learned.left_out)
            try:
                warm.modules.write_text(lines, errors="replace")
            except OSError as error:
                log_event("learned_nothing", why=str(error))
                return
            await warm.settled()
            warm.renew()
        for warm in list(self._programs.values()):
            await warm.settled()

    def _sections(self, text: str) -> Iterator[tuple[Program, str]]:
        """Yield each program in another replica's message, with the lines of its modules."""
        program: Optional[Program] = None
        lines: list[str] = []
        for line in [*text.splitlines(keepends=True), '{"program": null}']:
            if not line.startswith('{"program":'):
                lines.append(line)
                continue
            if program is not None and len(self._programs) < MOST_PROGRAMS:
                yield program, "".join(lines)
            program, lines = None, []
            with contextlib.suppress(ValueError):
                program = from_json(line, self._environment)

    @property
    def warm_start_skipped_modules(self) -> str:
        """Modules that can't be imported before a fork, with the reasons, or "" if there are none.

        Each worker imports these modules itself, in spite of its warm start.
        """
        clauses = dict.fromkeys(clause for warm in self._programs.values() for clause in warm.skipped)
        return "; ".join(clauses)[:MOST_CHARACTERS]

    def begin(self) -> None:
        """Start warm processes for the programs that are known.

        `settled` returns when each of these processes can fork workers, or will never be able to.
        """
        self._begun = asyncio.ensure_future(self._begin())

    async def _begin(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._impossible = f"{self._folder} can't be created: {error.strerror}"
            return
        command = parse(self._line)
        if not isinstance(command, PythonCommand) and is_python(self._line[0]):
            self._impossible = command.why
            return
        self._impossible = self._hand_overs.begin()
        if self._impossible:
            return
        for warm in self._stored():
            warm.renew()
        if self._preload and isinstance(command, PythonCommand):
            warm = self._add(of_command(command, self._environment))
            self._impossible = await warm.probe(command.options)
            if not self._impossible:
                warm.renew()
        for warm in list(self._programs.values()):
            await warm.settled()

    def _stored(self) -> Iterator[WarmProgram]:
        """Yield the programs that the agent of the previous container has stored."""
        for path in sorted(self._folder.glob(f"*{STORED}"))[:MOST_PROGRAMS]:
            with contextlib.suppress(OSError, ValueError):
                warm = self._add(from_json(path.read_text(), self._environment))
                if warm.size:
                    yield warm

    def _add(self, program: Program) -> WarmProgram:
        if program.key not in self._programs:
            preload = self._preload if program.line == tuple(self._line) else ()
            memory = functools.partial(self._memory, program.key)
            self._programs[program.key] = WarmProgram(
                program, self._folder, self._environment, self._reaper, preload, memory
            )
        return self._programs[program.key]

    def _memory(self, key: str) -> int:
        """Return the maximum memory in bytes that the warm process of one program may use for imports."""
        others = (warm.parent for name, warm in self._programs.items() if name != key)
        taken = sum(anonymous_memory(parent.pid) for parent in others if parent is not None)
        return max(0, container_memory() // MEMORY_SHARE - taken)

    def look(self) -> None:
        """Look for newly recorded modules to import, and for commands whose interpreters do not connect to the agent.

        The agent calls this method a few times per second.
        """
        now = asyncio.get_running_loop().time()
        for warm in self._programs.values():
            warm.look(now)
        if now > self._hand_overs.silent_since + SILENT_SECONDS:
            self._silent = SILENT

    def stop(self) -> None:
        self._hand_overs.close()
        if self._begun is not None:
            self._begun.cancel()
        for warm in self._programs.values():
            warm.stop()

    async def settled(self) -> None:
        """Wait until workers can be started at once, without waiting for imports."""
        if self._begun is not None:
            await asyncio.wait({self._begun})
        if (direct := self._direct) is not None and not direct.learning:
            direct.look(asyncio.get_running_loop().time())
            await direct.settled()

    @property
    def _direct(self) -> Optional[WarmProgram]:
        """Program of the user's command if its workers can be forked without starting an interpreter, otherwise None.

        That is possible if the command does nothing but run Python, and the program is known.
        """
        programs = self._programs.values()
        return next((warm for warm in programs if warm.program.line == tuple(self._line)), None)

    # --- start of a worker --------------------------------------------------------------------------------------------

    async def start(self, environment: Mapping[str, str], record: bool, prefix: str) -> Union[Process, Again]:
        """Start a worker, and return its process, or Again if the caller has to repeat the call.

        Set `record` if the worker records its imports.

        Raises:
            StartError: If the worker cannot be started.
        """
        if self._impossible:
            return start_command(self._line, environment, self._reaper, prefix)
        direct = self._direct
        if direct is not None and direct.importing and not direct.learning:
            return Again()
        if direct is not None and not direct.importing and (parent := direct.parent) is not None:
            differing = differing_variable(environment, parent.program.environment, parent.reads)
            if not differing:
                forked = await direct.fork(parent, environment, record, prefix)
                if not isinstance(forked, str):
                    direct.refused = ""
                    return forked
                direct.refused = forked
        process = start_command(
            self._line, {**environment, VARIABLE: self._hand_overs.next_value()}, self._reaper, prefix
        )
        start = self._hand_overs.add(process, record)
        process.ended.add_done_callback(lambda _: self._on_end(start.reports))
        return process

    def _on_end(self, reports: int) -> None:
        self._silent = "" if reports else SILENT

    async def _decide(self, interpreter: Interpreter) -> Union[Plain, Taken]:
        """Decide whether the script of an interpreter runs in a forked process or in the interpreter itself.

        Raises:
            ValueError: If the interpreter's description is not complete.
        """
        self._silent = ""
        program, start = reported(interpreter.report), interpreter.start
        known = program.key in self._programs
        if not known and (not start.record or (len(self._programs) >= MOST_PROGRAMS and not self._forget())):
            return Plain()
        warm = self._add(program)
        record = ""
        if start.record and program.key not in start.recorded:
            start.recorded.add(program.key)
            record = str(warm.modules)
        if warm.learning and warm.learner is not start.process:
            return Plain(record)
        for _ in range(MOST_ATTEMPTS):
            warm.look(asyncio.get_running_loop().time())
            await warm.settled()
            parent = warm.parent
            if parent is None:
                warm.refused = ""
                break
            if why := warm.unlike(parent, interpreter.report):
                warm.refused = why
                if record:
                    warm.adopt(program)
                break
            taken = await self._take(warm, interpreter, record)
            if isinstance(taken, Taken):
                return taken
            if isinstance(taken, str):
                warm.refused = taken
                break
        if record:
            warm.learner, warm.program = start.process, program
        return Plain(record)

    def _forget(self) -> bool:
        """Remove the oldest program that needs no warm process. Return whether there was such a program."""
        key = next((key for key, warm in self._programs.items() if warm.dispensable), None)
        if key is not None:
            del self._programs[key]
        return key is not None

    async def _take(self, warm: WarmProgram, interpreter: Interpreter, record: str) -> Union[Taken, Again, str]:
        """Fork a process that takes over the script of an interpreter.

        Return the answer to the interpreter (Taken), or Again if the caller has to repeat the call. If the script can't
        be taken over, return the reason.
        """
        process, parent = interpreter.start.process, warm.parent
        assert parent is not None
        if process.killed:
            return "its worker must end"
        request = asyncio.ensure_future(warm.take_over(parent, interpreter, record))
        process.taking_over.add(request)
        try:
            child = await request
        finally:
            process.taking_over.discard(request)
        if not isinstance(child, Child):
            return child
        process.scripts.append(child)
        if process.killed:
            process.send_signal(signal.SIGKILL)
        warm.refused = ""

        def refused(why: str) -> None:
            warm.refused = why

        return Taken(child, refused)
