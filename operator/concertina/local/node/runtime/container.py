"""One container of a pod: start its process, stop it, and track its state over all restarts."""

import asyncio
import signal
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concertina.local.node import images
from concertina.local.node.node_status import ContainerState, now
from concertina.local.node.runtime import container_environment, container_logs, mounts, rootfs
from concertina.local.node.runtime.runtime_client import LaunchFailed, Running, RuntimeClient
from concertina.local.node.runtime.runtime_process import Execution, Launch

Object = dict[str, Any]
_FIRST_BACKOFF, _LONGEST_BACKOFF, _FORGIVEN_AFTER = 10.0, 300.0, 600.0  # seconds, as the kubelet's
_MESSAGE_BYTES, _FALLBACK_BYTES, _FALLBACK_LINES = 4096, 2048, 80


@dataclass(frozen=True)
class Backoff:
    """Delay in seconds before the next restart: none at first, then twice as long after each failure."""

    seconds: float = 0.0

    def next(self) -> "Backoff":
        """Return the longer delay that applies after a further failure of the container."""
        return Backoff(min(2 * self.seconds, _LONGEST_BACKOFF) or _FIRST_BACKOFF)


@dataclass(frozen=True)
class Setting:
    """Parameters that a container gets from its pod when it starts."""

    variables: dict[str, str]
    image: images.Image
    mounts: list[rootfs.Mount]
    hostname: str


class RunningContainer:
    """Container of a pod, over all its restarts."""

    def __init__(self, spec: Object, folder: Path, runtime: RuntimeClient, state: ContainerState) -> None:
        self.spec, self.folder, self.state = spec, folder, state
        self.name = str(spec["name"])
        self.backoff = Backoff()
        self.log: container_logs.LogWriter | None = None
        self.running: Running | None = None
        self._runtime = runtime
        self._environment: dict[str, str] = {}
        self._started = 0.0

    def log_path(self, previous: bool = False) -> Path:
        """Return the path of the log of the container's latest start, or, with `previous`, of the start before it."""
        return self.folder / f"{self.state.restarts - previous}.log"

    async def start(self, setting: Setting) -> bool:
        """Start the process, and return whether that succeeded. If it fails, the container's state contains the reason.

        Raises:
            ConfigError: When there is no command.
        """
        variables = setting.variables
        argv = _command(self.spec, setting.image, variables)
        identity = uuid.uuid4().hex
        self.log = container_logs.LogWriter(self.log_path())
        pod_mounts = [*setting.mounts, self._termination_mount()]
        visible = [*mounts.of_image(setting.image.environment, pod_mounts), *pod_mounts]
        folder = self.spec.get("workingDir") or "/"
        launch = Launch(identity, argv, variables, folder, setting.hostname, visible, _asks_for_devices(self.spec))
        self.state.container_id = f"concertina://{identity}"
        self._environment, self._started = variables, time.monotonic()
        try:
            self.running = await self._runtime.start(launch, self.log.attach())
        except LaunchFailed as error:
            self._end({"exitCode": 128, "reason": "StartError", "message": str(error)}, now())
            return False
        has_probe = "readinessProbe" in self.spec or "startupProbe" in self.spec
        self.state.state = {"running": {"startedAt": now()}}
        self.state.started = "startupProbe" not in self.spec
        self.state.ready = not has_probe
        return True

    async def wait(self) -> int:
        """Wait until the process has ended and its output has been read. Return the exit code.

        The exit code is then also in the container's state.
        """
        assert self.running
        assert self.log
        code = await asyncio.shield(self.running.exit)
        await self.log.done.wait()
        if "running" in self.state.state:
            reason = "Completed" if code == 0 else "Error"
            since = self.state.state["running"]["startedAt"]
            self._end({"exitCode": code, "reason": reason, "message": self._message(code)}, since)
            if time.monotonic() - self._started > _FORGIVEN_AFTER:
                self.backoff = Backoff()
        return code

    async def stop(self, grace: float) -> None:
        """Run the preStop hook and send SIGTERM. After `grace` seconds, send SIGKILL.

        Return when the process has ended.
        """
        running = self.running
        if running is None or running.exit.done():
            return
        deadline = time.monotonic() + grace
        hook = (self.spec.get("lifecycle") or {}).get("preStop") or {}
        if "exec" in hook and grace > 0:
            await self.execute(hook["exec"]["command"], timeout=grace)
        elif "sleep" in hook and grace > 0:
            await asyncio.wait([running.exit], timeout=min(grace, hook["sleep"]["seconds"]))
        running.signal(signal.SIGTERM if grace > 0 else signal.SIGKILL)
        await asyncio.wait([running.exit], timeout=max(0.0, deadline - time.monotonic()))
        running.signal(signal.SIGKILL)
        await self.wait()

    async def execute(self, argv: list[str], timeout: float) -> tuple[int, str]:
        """Run a command in the container, and return its exit code and output.

        If the command takes too long, the exit code is 124.
        """
        assert self.running
        try:
            writer = container_logs.LogWriter(self.folder / f"exec-{uuid.uuid4().hex}.log")
        except OSError as error:
            return 126, str(error)
        execution = Execution(
            uuid.uuid4().hex, argv, self._environment, self.spec.get("workingDir") or "/", self.running.pid.result()
        )
        try:
            process = await self._runtime.start(execution, writer.attach())
            done, _ = await asyncio.wait([process.exit], timeout=timeout)
            process.signal(signal.SIGKILL)
            code = process.exit.result() if done else 124
            output = b"".join(container_logs.lines(writer.path)).decode(errors="replace")
            return code, output
        except LaunchFailed as error:
            return 126, str(error)
        finally:
            writer.path.unlink(missing_ok=True)

    def kill(self) -> None:
        """Send SIGKILL to the container's process, if it runs."""
        if self.running:
            self.running.signal(signal.SIGKILL)

    def retire(self) -> None:
        """Move the state of the run that has ended to `last_state`, before the container is started again."""
        self.state.last_state = {"terminated": self.state.state["terminated"]}

    def never_ran(self) -> None:
        """If the container is waiting, mark it as ended, because its pod is being deleted."""
        if "waiting" in self.state.state:
            text = "The container could not be located when the pod was terminated"
            self._end({"exitCode": 137, "reason": "ContainerStatusUnknown", "message": text}, now())

    def waiting(self, reason: str, message: str = "") -> None:
        """Set the container's state to waiting, with a reason."""
        self.state.state = {"waiting": {"reason": reason} | ({"message": message} if message else {})}
        self.state.ready = self.state.started = False

    def _end(self, terminated: Object, started: str) -> None:
        times = {"startedAt": started, "finishedAt": now(), "containerID": self.state.container_id}
        self.state.state = {"terminated": {key: value for key, value in (terminated | times).items() if value != ""}}
        self.state.ready = self.state.started = False

    def _termination_mount(self) -> rootfs.Mount:
        path = self.folder / f"{self.state.restarts}.termination"
        path.touch()
        path.chmod(0o666)
        return rootfs.Mount(str(path), self.spec.get("terminationMessagePath") or "/dev/termination-log")

    def _message(self, code: int) -> str:
        path = self.folder / f"{self.state.restarts}.termination"
        text = path.read_bytes()[:_MESSAGE_BYTES].decode(errors="replace")
        if text or code == 0 or self.spec.get("terminationMessagePolicy") != "FallbackToLogsOnError":
            return text
        tail = b"".join(container_logs.lines(self.log_path(), tail=_FALLBACK_LINES))
        return tail[-_FALLBACK_BYTES:].decode(errors="replace")


def _asks_for_devices(spec: Object) -> bool:
    """Return whether the container requests an extended resource such as nvidia.com/gpu.

    A container without such a request gets no GPU devices. Otherwise all workers on this machine would use the first
    GPU.
    """
    return any("/" in name for name in (spec.get("resources") or {}).get("limits") or {})


def _command(spec: Object, image: images.Image, variables: dict[str, str]) -> list[str]:
    """Return the command and arguments of a container, from its spec and its image, as container runtimes do.

    Raises:
        ConfigError: When there is no command.
    """
    command = [container_environment.expand(word, variables) for word in spec.get("command") or []] or list(
        image.command
    )
    argv = command + [container_environment.expand(word, variables) for word in spec.get("args") or []]
    if not argv:
        explanation = f"image {spec['image']} stands for {image.environment}, which has none of its own"
        raise container_environment.ConfigError(f'container "{spec["name"]}" has no command: {explanation}')
    return argv
