"""What the pod says to its agent: the environment of docs/architecture.md, read once."""

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
    """The environment lacks something; a sentence."""


@dataclasses.dataclass(frozen=True)
class MetricsSettings:
    """What of itself this pod tells Prometheus, and to whom."""

    namespace: str
    job: str
    node: str
    port: int
    per_rank: bool = False
    """Of each worker by itself, not their sum."""
    token: Optional[str] = None
    """None: nobody has to show any. Empty: one is asked for that the pod has not got."""


@dataclasses.dataclass(frozen=True)
class AgentSettings:
    uid: str
    replica: str
    pod_ip: str
    port: int
    workers: int
    volume: Path
    """Survives the container: what was seen, snapshots, copies, the workers' socket."""
    identity: Path
    """Folder of ca.crt, tls.crt and tls.key."""
    grace: float
    """Seconds from SIGTERM to SIGKILL, less a margin."""
    checkpoints: bool
    """The job names durable storage."""
    environment: Mapping[str, str]
    command: tuple[str, ...] = ()
    """Empty: the bundled trainer."""
    warm_start: bool = False
    """Of a command of one's own; the bundled trainer always is."""
    job: str = ""
    """NAMESPACE/NAME"""
    track_every: int = 0
    """Every so many steps are told to a tracker; 0: none."""
    preload: tuple[str, ...] = ()
    """Modules that a warm start imports before it knows of others."""
    package: str = "concertina_trainer"
    """Whose modules preload, worker, uploader and store are run, when bundled."""
    metrics: Optional[MetricsSettings] = None
    """None: they are not served."""

    @property
    def bundled(self) -> bool:
        return not self.command

    @property
    def even(self) -> bool:
        """Ranks hold even parts of the state, in their order, as FSDP alone deals them out."""
        return self.bundled and "CONCERTINA_PARALLELISM" not in self.environment


def read(
    environment: Mapping[str, str], command: tuple[str, ...], package: str = "concertina_trainer"
) -> AgentSettings:
    """Raises SettingsError."""
    checkpoint = environment.get("CONCERTINA_CHECKPOINT") or "null"
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
            environment=_with_script_api(_with_temporary_folder(_for_workers(environment)), command),
            command=command,
            warm_start=bool(command) and bool(warm.get("enabled")),
            preload=_names(warm.get("preload")),
            package=package,
            job=environment.get("CONCERTINA_JOB", ""),
            metrics=_metrics(environment),
            track_every=_track_every(environment.get("CONCERTINA_TRACKING") or "null"),
        )
    except KeyError as error:
        raise AgentSettingsError(
            f"the environment variable {error.args[0]} is missing; the operator sets it"
        ) from error
    except ValueError as error:
        raise AgentSettingsError(f"the agent's environment can't be read: {str(error)[:400]}") from error


def _object(text: str) -> Mapping[str, object]:
    """Raises ValueError."""
    found = json.loads(text) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{text[:100]} is no object")
    return found


def _track_every(tracking: str) -> int:
    """Raises ValueError."""
    every = _object(tracking).get("everySteps", 1) if json.loads(tracking) else 0
    return max(1, every) if isinstance(every, int) and every else 0


METRICS_TOKEN = "CONCERTINA_METRICS_TOKEN"


def _metrics(environment: Mapping[str, str]) -> Optional[MetricsSettings]:
    """None where an operator has set the pod up that knows nothing of them. Raises ValueError."""
    asked = _object(environment.get("CONCERTINA_METRICS") or "{}")
    if not asked:
        return None
    namespace, _, job = environment.get("CONCERTINA_JOB", "").partition("/")
    token = environment.get(METRICS_TOKEN, "").strip() if asked.get("token") else None
    node = environment.get("CONCERTINA_NODE", "")
    port = int(str(asked.get("port")))
    return MetricsSettings(namespace, job, node, port, asked.get("perRank") is True, token)


def _names(found: object) -> tuple[str, ...]:
    return tuple(map(str, found)) if isinstance(found, list) else ()


SCRIPT_API = "python"
"""Folder of the volume in which `install` puts `trainingjob` and what it stands on, for commands of one's own."""


STORAGE_API = "storage"
"""Folder beside it, with the client of durable storage, for scripts whose image has none."""


def _with_script_api(environment: dict[str, str], command: tuple[str, ...]) -> dict[str, str]:
    """At the end of PYTHONPATH: it can stand in nobody's way."""
    if not command:
        return environment
    folder = str(_volume(environment) / SCRIPT_API)
    known = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": f"{known}{os.pathsep}{folder}" if known else folder}


def _for_workers(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Without what is the agent's alone."""
    return {name: value for name, value in environment.items() if name != METRICS_TOKEN}


def _volume(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("CONCERTINA_VOLUME") or "/concertina")


def _with_temporary_folder(environment: Mapping[str, str]) -> dict[str, str]:
    """With a TMPDIR in our volume where the container has no folder to write to: torch can't be imported without
    (decision "Temporary files where nothing else is writable")."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        folder = _volume(environment) / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        return {**environment, "TMPDIR": str(folder)}
    return dict(environment)
