"""Kueue's real controller beside the tests' API server, with its webhooks, and objects for it.

`make kueue` builds it, once. Kueue runs as the cluster's administrator: the tests judge its decisions, not its role.
"""

from __future__ import annotations

import base64
import json
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders.cluster.queues import API_VERSION, KUEUE, Client
from builders.until import GIVE_UP, until
from concertina.local.binaries import programs
from concertina.local.control_plane.api import ControlPlaneError
from concertina.local.control_plane.certificates import ClusterAuthority
from concertina.local.host import linux_namespaces, processes

Object = dict[str, Any]
PROGRAM = programs.ready(programs.KUEUE).get("kueue")
needed = pytest.mark.skipif(not PROGRAM, reason="Kueue's controller is not built: run `make kueue` once")
JOB_KIND = "TrainingJob.v1beta1.concertina.dev"
HOST = "127.0.0.1"
SYSTEM = ("kube-system", "kueue-system")
CERTIFICATE_FOLDER = "kueue/metrics/certs"
"""Folder below /etc in which Kueue requires a certificate for metrics. The program knows no option for it."""
WITH_ETC = 'mount --bind "$0" /etc && exec "$@"'
REFUSED_WORKLOAD: Object = {
    "apiVersion": API_VERSION,
    "kind": "Workload",
    "metadata": {"name": "refused", "namespace": "default"},
    "spec": {
        "podSets": [
            {
                "name": name,
                "count": 2,
                "minCount": 1,
                "template": {"spec": {"containers": [{"name": "main", "image": "none"}]}},
            }
            for name in ("first", "second")
        ]
    },
}
"""Workload that only the webhook refuses: the schema allows several pod sets with minCount."""


class Kueue:
    """Processes of Kueue's controller, one after the other, on the same ports and with the same configuration."""

    def __init__(self, kubeconfig: Path, client: Client, folder: Path, **configuration: Any) -> None:
        """Prepare the files of a controller.

        Args:
            kubeconfig: Of a cluster whose API server runs on this machine: it calls the webhooks on 127.0.0.1.
            configuration: Fields of Kueue's Configuration, such as waitForPodsReady.
        """
        self.kubeconfig, self.client, self.folder = kubeconfig, client, folder
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / "kueue.log"
        self.webhook_port, self.health_port = processes.free_ports(HOST, 2)
        authority = ClusterAuthority.create(folder / "pki")
        self.authority = authority.pair.certificate.read_bytes()
        pair = authority.issue("serving", "kueue", hosts=[HOST])
        for certificates in (folder / "serving", folder / "etc" / CERTIFICATE_FOLDER):
            certificates.mkdir(parents=True)
            shutil.copy(pair.certificate, certificates / "tls.crt")
            shutil.copy(pair.key, certificates / "tls.key")
        self.configure(**configuration)

    def configure(self, **configuration: Any) -> None:
        """Write the configuration of the next start: defaults of the tests, and fields that are given."""
        (self.folder / "configuration.yaml").write_text(yaml.safe_dump(self._configuration() | configuration))

    def _configuration(self) -> Object:
        return {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"{HOST}:{self.health_port}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": HOST, "port": self.webhook_port, "certDir": str(self.folder / "serving")},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "featureGates": {"VisibilityOnDemand": False},  # its server requires an aggregated API
            "integrations": {"frameworks": ["batch/job", "pod"], "externalFrameworks": [JOB_KIND]},
        }

    def install(self) -> None:
        """Apply the CRDs, and wait until the API server serves them: without them the controller exits."""
        assert PROGRAM
        apply = ("apply", "--server-side", "--force-conflicts", "-f")
        self._kubectl(*apply, str(PROGRAM.parent / "crds"))
        files = (path.stem.partition("_") for path in (PROGRAM.parent / "crds").glob("*_*.yaml"))
        names = [f"{plural}.{group}" for group, _, plural in files]  # reading the manifests takes seconds
        until(lambda: all(self._established(name) for name in names), "Kueue's CRDs to be served")

    def _kubectl(self, *arguments: str, stdin: str | None = None) -> None:
        command = [str(programs.control_plane(lambda _: None)["kubectl"]), f"--kubeconfig={self.kubeconfig}"]
        subprocess.run([*command, *arguments], input=stdin, text=True, timeout=120, check=True, capture_output=True)

    def _established(self, crd: str) -> bool:
        definition = self.client.call("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd}")
        conditions = definition.get("status", {}).get("conditions") or ()
        return any((condition["type"], condition["status"]) == ("Established", "True") for condition in conditions)

    def start(self, wait: bool = True) -> None:
        assert PROGRAM
        command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", WITH_ETC, str(self.folder / "etc")]
        command += [str(PROGRAM), f"--config={self.folder / 'configuration.yaml'}", "--zap-log-level=2"]
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
            until(self._ready, "Kueue to be ready", lambda: self.text()[-3000:])

    def _ready(self) -> bool:
        assert self.process
        assert self.process.poll() is None, f"Kueue ended: {self.text()[-3000:]}"
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.health_port}/readyz", timeout=5):
                return True
        except OSError:
            return False

    def register_webhooks(self) -> None:
        """Register all of Kueue's webhooks, and wait until the API server calls them."""
        assert PROGRAM
        with (PROGRAM.parent / "webhooks.yaml").open() as manifests:
            for configuration in yaml.safe_load_all(manifests):
                for webhook in configuration["webhooks"]:
                    webhook["clientConfig"] = self._client_configuration(webhook["clientConfig"]["service"]["path"])
                    if webhook["rules"][0]["apiGroups"] != ["kueue.x-k8s.io"]:
                        webhook["namespaceSelector"] = not_in(SYSTEM)
                self._kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(configuration))
        until(self._refuses, "the API server to call Kueue's webhooks", self.text)

    def _client_configuration(self, path: str) -> Object:
        authority = base64.b64encode(self.authority).decode()
        return {"url": f"https://{HOST}:{self.webhook_port}{path}", "caBundle": authority}

    def _refuses(self) -> bool:
        path = f"{KUEUE}/namespaces/default/workloads?dryRun=All"
        try:
            self.client.call("POST", path, REFUSED_WORKLOAD)
        except ControlPlaneError as error:
            return "vworkload.kb.io" in str(error) and "at most one podSet" in str(error)
        return False

    def end(self, number: int = signal.SIGKILL) -> int:
        """Stop the controller and return its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=GIVE_UP)

    def unregister_webhooks(self) -> None:
        """Delete the webhook configurations: without a controller they refuse every pod."""
        for kind, name in (("validating", "validating"), ("mutating", "mutating")):
            self._kubectl(
                "delete", f"{kind}webhookconfiguration", f"{name}-webhook-configuration", "--ignore-not-found"
            )

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@contextmanager
def serve(kubeconfig: Path, client: Client, folder: Path, **configuration: Any) -> Iterator[Kueue]:
    """Run Kueue with its webhooks. Its CRDs stay: deleting them would wait for finalizers of their objects."""
    kueue = Kueue(kubeconfig, client, folder, **configuration)
    kueue.install()
    kueue.start()
    try:
        kueue.register_webhooks()
        yield kueue
    finally:
        kueue.unregister_webhooks()
        if kueue.process and kueue.process.poll() is None:
            kueue.end(signal.SIGTERM)


def not_in(namespaces: Sequence[str]) -> Object:
    """Return a label selector that excludes namespaces by name."""
    return {
        "matchExpressions": [
            {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": list(namespaces)},
        ]
    }
