"""Command `concertina-agent`, whose subcommand `run` is process 1 of each replica.

    concertina-agent install DEST        write DEST/agent.pyz, which runs with any Python from 3.9 on, and DEST/python,
                                         which contains the package `trainingjob` for scripts and its dependencies;
                                         with --storage-client, also write DEST/storage, a client of durable storage
    concertina-agent run --bundled       run the bundled trainer
    concertina-agent run -- COMMAND...   run a user's own command
    concertina-agent report              print the report of this container's agent and, on a coordinator, of its round
    concertina-agent trace               print a trace of some steps of a worker of this container

Environment variables contain all other settings (docs/architecture.md, "Contents of a pod").
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import shutil
import ssl
import sys
import tempfile
import zipapp
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Optional

import concertina_protocol as protocol
from concertina_agent import settings
from concertina_protocol import addresses, descriptors
from concertina_protocol.connection import small_tls_buffers
from concertina_protocol.log import log_event

PYZ = "agent.pyz"
SCRIPT_PACKAGES = ("concertina_protocol", "concertina_state", "concertina_data", "concertina_tracking", "trainingjob")
STORAGE_MODULES = ("obstore", "typing_extensions")
"""Python modules of the client of durable storage, as installed in the agent's image."""
ENTRY = "zipapp_main.py"
"""File of this package that becomes the zipapp's __main__."""
REPORT_SECONDS = 10.0
TERMINATION_LOG = Path("/dev/termination-log")
"""File whose contents Kubernetes shows in the pod's status."""


def install(destination: Path, storage_client: bool = False) -> Path:
    """Write this package as a zipapp, and the packages for scripts beside it.

    A process that reads the zipapp at the same time gets the old or the new version as a whole.
    """
    for package in SCRIPT_PACKAGES:
        _copy_package(package, destination / settings.SCRIPT_API / package)
    if storage_client:
        _copy_storage_client(destination / settings.STORAGE_API)
    with tempfile.TemporaryDirectory(dir=destination) as scratch:
        tree, built = Path(scratch, "tree"), Path(scratch, PYZ)
        for package in ("concertina_agent", *SCRIPT_PACKAGES):
            _copy_package(package, tree / package)
        shutil.copy(tree / "concertina_agent" / ENTRY, tree / "__main__.py")
        zipapp.create_archive(tree, built, interpreter="/usr/bin/env python3")
        built.chmod(0o755)
        built.replace(destination / PYZ)
    return destination / PYZ


def _copy_storage_client(target: Path) -> None:
    """Copy the client of durable storage to `target`. If this image has none, copy nothing.

    The client is built for any CPython from 3.10 on, so it also works in other images.
    """
    target.mkdir(parents=True, exist_ok=True)
    for name in STORAGE_MODULES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and spec.submodule_search_locations:
            shutil.copytree(Path(spec.origin).parent, target / name, dirs_exist_ok=True)
        elif spec is not None and spec.origin is not None:
            shutil.copy(spec.origin, target)


def _copy_package(package: str, target: Path) -> None:
    """Copy a package of this project to `target`.

    The source is the package's folder, or the zipapp that this process runs from.
    """
    for name, content in _files(package):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)


def _files(package: str) -> Iterator[tuple[str, bytes]]:
    """Yield the path of each file within the package, and the file's contents."""
    root = Path(__file__).parents[1]
    if root.is_dir():
        for module in sorted((root / package).rglob("*")):
            if module.is_file() and "__pycache__" not in module.parts:
                yield module.relative_to(root / package).as_posix(), module.read_bytes()
        return
    with zipfile.ZipFile(root) as archive:
        for name in archive.namelist():
            if name.startswith(f"{package}/") and not name.endswith("/"):
                yield name.removeprefix(f"{package}/"), archive.read(name)


def run(command: tuple[str, ...], package: str) -> int:
    """Run the agent until it has to exit, and return the exit code.

    If the pod's settings are invalid, the exit code is 2, and a sentence is printed on stderr.
    """
    from concertina_agent.agent import Agent

    descriptors.raise_limit()

    async def life() -> int:
        return await Agent(settings.read(os.environ, command, package)).run()

    try:
        with small_tls_buffers():
            return asyncio.run(life())
    except (settings.AgentSettingsError, OSError, ssl.SSLError) as error:
        sentence = f"{type(error).__name__}: {error}"
        log_event("agent_failed", error=sentence)
        with contextlib.suppress(OSError):
            TERMINATION_LOG.write_text(sentence)
        return 2


def report() -> int:
    """Print the agent's Report as a line of the protocol, and return the exit code.

    If the agent does not answer, the exit code is 1, and a sentence is printed on stderr.
    """
    from concertina_agent.net import tls
    from concertina_agent.net.wire import Connector

    try:
        agent_settings = settings.read(os.environ, ())
        connector = Connector(tls.client_context(agent_settings.identity), agent_settings.uid)
        address = addresses.join(agent_settings.pod_ip, agent_settings.port)
        answer = asyncio.run(connector.ask(address, protocol.Watch(agent_settings.uid), REPORT_SECONDS))
    except (settings.AgentSettingsError, OSError, asyncio.TimeoutError, protocol.ProtocolError) as error:
        print(f"the agent does not answer: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(protocol.encode(answer))
    return 0


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="concertina-agent", description="Process 1 of each replica of a TrainingJob.")
    actions = parser.add_subparsers(dest="action", required=True)
    installing = actions.add_parser("install", help=f"write the agent, {PYZ}, into a folder")
    installing.add_argument("destination", type=Path)
    installing.add_argument("--storage-client", action="store_true", help="include the client of durable storage")
    running = actions.add_parser("run", help="run the workers that the operator requests")
    running.add_argument("--bundled", action="store_true", help="run the trainer that is in the image")
    running.add_argument("--package", default="concertina_trainer", help=argparse.SUPPRESS)
    actions.add_parser("report", help="print the status that the agent of this container reports")
    tracing = actions.add_parser("trace", help="print a trace of some steps of a worker of this container")
    tracing.add_argument("--rank", type=int, required=True)
    tracing.add_argument("--first-step", type=int, default=0)
    tracing.add_argument("--steps", type=int, required=True)
    tracing.add_argument("--seconds", type=float, default=60.0, help="seconds after which the command gives up")
    running.usage = "%(prog)s (--bundled | -- COMMAND...)"
    own_arguments, command = _split(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(own_arguments)
    if options.action == "install":
        print(install(options.destination, options.storage_client))
        return 0
    if options.action == "report":
        return report()
    if options.action == "trace":
        from concertina_agent.trace_command import trace

        return trace(options.rank, options.first_step, options.steps, options.seconds)
    if options.bundled == bool(command):
        parser.error("run needs either --bundled, or -- and a command")
    return run(command, options.package)


def _split(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the arguments before the first `--`, and the arguments after it, which are the user's own command."""
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:separator]), tuple(arguments[separator + 1 :])


if __name__ == "__main__":
    sys.exit(main())
