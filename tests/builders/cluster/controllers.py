"""Controllers of other projects, as processes beside an API server of this machine.

The API server calls their webhooks on 127.0.0.1.
They run as the cluster's administrator, because tests and benchmarks judge their decisions and not their roles.
"""

from __future__ import annotations

import base64
import json
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

from builders.cluster.crds import wait_established
from builders.cluster.queues import Client
from builders.until import GIVE_UP, until
from concertina.local.binaries import programs
from concertina.local.control_plane.certificates import ClusterAuthority
from concertina.local.host import linux_namespaces, processes

Object = dict[str, Any]
HOST = "127.0.0.1"
WITH_ETC = 'mount --bind "$0" /etc && exec "$@"'


class Controller:
    """Processes of a controller, one after the other, on the same ports and with the same configuration."""

    def __init__(self, program: Path, kubeconfig: Path, client: Client, folder: Path, certificates: str = "") -> None:
        """Prepare the files of a controller.

        Args:
            program: Program with its CRDs and the manifests of its webhooks beside it.
            kubeconfig: Kubeconfig of a cluster whose API server runs on this machine.
            certificates: Folder below /etc in which the program requires a certificate, without an option to change it.
        """
        self.program, self.kubeconfig, self.client, self.folder = program, kubeconfig, client, folder
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / f"{program.name}.log"
        self.webhook_port, self.health_port, self.metrics_port = processes.free_ports(HOST, 3)
        self.configuration = folder / "configuration.yaml"
        authority = ClusterAuthority.create(folder / "pki")
        self.authority = authority.pair.certificate.read_bytes()
        pair = authority.issue("serving", program.name, hosts=[HOST])
        for place in (folder / "serving", folder / "etc" / certificates):
            place.mkdir(parents=True)
            shutil.copy(pair.certificate, place / "tls.crt")
            shutil.copy(pair.key, place / "tls.key")

    def install(self) -> None:
        """Apply the CRDs, and wait until the API server serves them: without them the controller exits."""
        crds = self.program.parent / "crds"
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(crds))
        wait_established(self.client)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> None:
        command = [str(programs.control_plane(lambda _: None)["kubectl"]), f"--kubeconfig={self.kubeconfig}"]
        subprocess.run([*command, *arguments], input=stdin, text=True, timeout=120, check=True, capture_output=True)

    def start(self, wait: bool = True) -> None:
        """Start the process. It ends with the thread that calls this."""
        command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", WITH_ETC, str(self.folder / "etc")]
        command += [str(self.program), f"--config={self.configuration}", "--zap-log-level=2"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={"KUBECONFIG": str(self.kubeconfig), "HOME": str(self.folder), "PATH": "/usr/bin:/bin"},
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=linux_namespaces.die_with_parent,  # a run of the tests that is killed leaves none behind
            )
        if wait:
            until(self._ready, f"{self.program.name} to be ready", lambda: self.text()[-3000:])

    def _ready(self) -> bool:
        assert self.process
        assert self.process.poll() is None, f"{self.program.name} ended: {self.text()[-3000:]}"
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.health_port}/readyz", timeout=5):
                return True
        except OSError:
            return False

    def register_webhooks(self) -> None:
        """Register all webhooks."""
        for configuration in self._webhooks():
            for webhook in configuration["webhooks"]:
                path = webhook["clientConfig"]["service"]["path"]
                authority = base64.b64encode(self.authority).decode()
                url = f"https://{HOST}:{self.webhook_port}{path}"
                webhook["clientConfig"] = {"url": url, "caBundle": authority}
                self.limit(webhook)
            self.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(configuration))

    def limit(self, webhook: Object) -> None:
        """Limit a webhook to the objects that it is meant for."""

    def _webhooks(self) -> list[Object]:
        read = yaml.safe_load_all((self.program.parent / "webhooks.yaml").read_text())
        named = [configuration for configuration in read if configuration]
        for configuration in named:
            configuration["metadata"]["name"] = f"{self.program.name}-{configuration['metadata']['name']}"
        return named

    def end(self, number: int = signal.SIGKILL) -> int:
        """Stop the controller and return its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=GIVE_UP)

    def unregister_webhooks(self) -> None:
        """Delete the webhook configurations.

        Without a controller, the API server would refuse all objects that they match.
        """
        for configuration in self._webhooks():
            kind, name = configuration["kind"], configuration["metadata"]["name"]
            self.kubectl("delete", kind, name, "--ignore-not-found")

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


Served = TypeVar("Served", bound=Controller)


@contextmanager
def serving(controller: Served) -> Iterator[Served]:
    """Run a controller with its webhooks. Its CRDs stay: deleting them would wait for finalizers of their objects."""
    controller.install()
    controller.start()
    try:
        controller.register_webhooks()
        yield controller
    finally:
        controller.unregister_webhooks()
        if controller.process and controller.process.poll() is None:
            controller.end(signal.SIGTERM)
