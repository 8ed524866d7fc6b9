"""Settings of the agent, read from the pod's environment variables when the agent starts (docs/architecture.md)."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

from concertina_protocol import PORT


class AgentSettingsError(ValueError):
    """Error that the environment variables are incomplete or invalid. The text is a sentence."""


@dataclasses.dataclass(frozen=True)
class MetricsSettings:
    """Settings of the metrics that this pod serves."""

    namespace: str
    job: str
    node: str
    port: int
    per_rank: bool = False
    """True if each worker's metrics are served. Otherwise the sums over all workers are served."""
    token: Optional[str] = None
    """Bearer token that clients must present.

    If None, no token is required. If empty, a token is required, but the pod does not have it, so every client is
    refused.
    """


@dataclasses.dataclass(frozen=True)
class AgentSettings:
    """Settings of the agent."""

    uid: str
    replica: str
    pod_ip: str
    port: int
    workers: int
    volume: Path
    """Folder that persists when the container restarts.

    It contains the highest round that the agent has seen, snapshots, copies of other replicas' snapshots, and the
    socket.
    """
    identity: Path
    """Folder with the files ca.crt, tls.crt and tls.key."""
    grace: float
    """Seconds from SIGTERM to SIGKILL, less a safety margin."""
    checkpoints: bool
    """True if the job specifies durable storage."""
    environment: Mapping[str, str]
    command: tuple[str, ...] = ()
    """The user's own command, or empty for the bundled trainer."""
    warm_start: bool = False
    """True if a user's own command gets a warm start. The bundled trainer always gets one."""
    job: str = ""
    """Name of the job as NAMESPACE/NAME."""
    track_every: int = 0
    """N if every N-th step is sent to the tracking tool, or 0 without tracking."""
    step_detection: bool = False
    """True if a hook in torch counts the optimizer steps of a user's own command."""
    preload: tuple[str, ...] = ()
    """Modules that a warm start imports in advance until the modules of the script are known.

    A warm start forks workers from a process that has imported their modules already.
    """
    package: str = "concertina_trainer"
    """Python package of the bundled trainer.

    The agent runs the package's modules preload, worker, uploader and store.
    """
    metrics: Optional[MetricsSettings] = None
    """Settings of the metrics, or None if no metrics are served."""

    @property
    def bundled(self) -> bool:
        return not self.command

    @property
    def even(self) -> bool:
        """True if the state is divided into equally large parts, in the order of the ranks.

        This is known only for the bundled trainer without tensor, pipeline or other parallelism than FSDP.
        """
        return self.bundled and "CONCERTINA_PARALLELISM" not in self.environment

    @property
    def requests_devices(self) -> bool:
        """True if the pod may have GPUs of its own.

        A privileged pod that requests no GPU still sees the GPUs of other pods.
        """
        return self.environment.get("CONCERTINA_PREFLIGHT") != "none"


def read(
    environment: Mapping[str, str], command: tuple[str, ...], package: str = "concertina_trainer"
) -> AgentSettings:
    """Return the agent's settings, given the environment variables and the user's own command.

    Raises:
        AgentSettingsError: If the environment is incomplete or invalid.
    """
    checkpoint = environment.get("CONCERTINA_CHECKPOINT") or "null"
    step_detection = bool(command) and environment.get("CONCERTINA_STEP_DETECTION") != "false"
    try:
        warm = _object(environment.get("CONCERTINA_WARM_START") or "{}")
        return AgentSettings(
            uid=environment["CONCERTINA_UID"],
            replica=environment["CONCERTINA_REPLICA"],
            pod_ip=environment["CONCERTINA_POD_IP"],
            port=int(environment.get("CONCERTINA_PORT") or PORT),
            workers=int(environment.get("CONCERTINA_WORKERS") or 1),
            volume=_volume(environment),
            identity=Path(environment.get("CONCERTINA_IDENTITY") or "/etc/concertina"),
            grace=max(float(environment.get("CONCERTINA_GRACE_SECONDS") or 30) - 1, 0.5),
            checkpoints=json.loads(checkpoint) is not None,
            environment=_with_hook(
                _with_script_api(
                    _with_trainer_defaults(_with_temporary_folder(_for_workers(environment)), command), command
                ),
                step_detection or (bool(command) and bool(warm.get("enabled"))),
            ),
            command=command,
            warm_start=bool(command) and bool(warm.get("enabled")),
            step_detection=step_detection,
            preload=_names(warm.get("preload")),
            package=package,
            job=environment.get("CONCERTINA_JOB", ""),
            metrics=_metrics(environment),
            track_every=_track_every(environment.get("CONCERTINA_TRACKING") or "null"),
        )
    except KeyError as error:
        raise AgentSettingsError(
            f"the environment variable {error.args[0]} is missing, which the operator sets: start the agent "
            "in a pod of a TrainingJob"
        ) from error
    except ValueError as error:
        raise AgentSettingsError(f"the agent's environment can't be read: {str(error)[:400]}") from error


def _object(text: str) -> Mapping[str, object]:
    """Parse a JSON object, and return it. For the text `null`, return an empty object.

    Raises:
        ValueError: If the text is not a JSON object.
    """
    fields = json.loads(text) or {}
    if not isinstance(fields, dict):
        raise ValueError(f"{text[:100]!r} is not a JSON object")
    return fields


def _track_every(tracking: str) -> int:
    """Return the number of steps between two tracked steps, or 0 without tracking.

    Raises ValueError, as `_object` does.
    """
    every = _object(tracking).get("everySteps", 1) if json.loads(tracking) else 0
    return max(1, every) if isinstance(every, int) and every else 0


METRICS_TOKEN = "CONCERTINA_METRICS_TOKEN"


def _metrics(environment: Mapping[str, str]) -> Optional[MetricsSettings]:
    """Return the settings of the metrics, or None if an operator version without metrics has created the pod.

    Raises ValueError if a setting is invalid.
    """
    fields = _object(environment.get("CONCERTINA_METRICS") or "{}")
    if not fields:
        return None
    namespace, _, job = environment.get("CONCERTINA_JOB", "").partition("/")
    token = environment.get(METRICS_TOKEN, "").strip() if fields.get("token") else None
    node = environment.get("CONCERTINA_NODE", "")
    port = int(str(fields.get("port")))
    return MetricsSettings(namespace, job, node, port, fields.get("perRank") is True, token)


def _names(names: object) -> tuple[str, ...]:
    return tuple(map(str, names)) if isinstance(names, list) else ()


SCRIPT_API = "python"
"""Name of the folder in the volume with the package `trainingjob` and its dependencies, for users' own commands.

The command `install` writes this folder.
"""


STORAGE_API = "storage"
"""Name of the folder beside SCRIPT_API with a client of durable storage, for scripts in images without a client."""


def _with_script_api(environment: dict[str, str], command: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables with the folder of the package `trainingjob` in PYTHONPATH.

    The folder is the last one in PYTHONPATH, so that `trainingjob` shadows no other package.
    """
    if not command:
        return environment
    folder = str(_volume(environment) / SCRIPT_API)
    users_path = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": f"{users_path}{os.pathsep}{folder}" if users_path else folder}


HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "workers", "hook")
"""Folder with a `sitecustomize` module, which runs at the start of each Python process of a user's own command."""


def _with_hook(environment: dict[str, str], is_needed: bool) -> dict[str, str]:
    """Return the environment with the folder of `hook/sitecustomize.py` at the beginning of PYTHONPATH, if `is_needed`.

    Python then imports the hook in each worker of a user's own command.
    """
    if not is_needed:
        return environment
    return {**environment, "PYTHONPATH": os.pathsep.join((HOOK, environment["PYTHONPATH"]))}


COMPILED = "compiled"
"""Name of the folder in the volume for compiled code. The folder is private to the pod."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names of the environment variable for torch's CUDA allocator: the present name, then the older one."""


def _with_trainer_defaults(environment: dict[str, str], command: tuple[str, ...]) -> dict[str, str]:
    """Return the environment with defaults for the bundled trainer.

    Variables that the pod template sets are not changed. By default, the compiler's cache is in the pod's own volume.
    Workers run the code in this cache. In a folder for temporary files, other jobs could change that code.
    """
    if command:
        return environment
    defaults = {"TORCHINDUCTOR_CACHE_DIR": str(_volume(environment) / COMPILED)}
    if not any(name in environment for name in ALLOCATOR):
        # Segments that can grow leave less memory that is free but in pieces of the wrong size.
        defaults[ALLOCATOR[0]] = "expandable_segments:True"
    return {**defaults, **environment}


def _for_workers(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment without the variables that only the agent may see."""
    return {name: value for name, value in environment.items() if name != METRICS_TOKEN}


def _volume(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("CONCERTINA_VOLUME") or "/concertina")


def _with_temporary_folder(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with a usable temporary folder.

    If the container has no writable temporary folder, TMPDIR is set to a folder in the volume.

    torch cannot be imported without a temporary folder (decision "Temporary files where nothing else is writable").
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        folder = _volume(environment) / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        return {**environment, "TMPDIR": str(folder)}
    return dict(environment)
