"""Kueue's real controller beside an API server of this machine, with its webhooks.

`make kueue` builds it, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders.cluster.controllers import HOST, Controller
from builders.cluster.queues import API_VERSION, KUEUE, Client
from builders.until import until
from concertina.local.binaries import programs
from concertina.local.control_plane.api import ControlPlaneError

Object = dict[str, Any]
PROGRAM = programs.ready(programs.KUEUE).get("kueue")
needed = pytest.mark.skipif(not PROGRAM, reason="Kueue's controller is not built: run `make kueue` once")
JOB_KIND = "TrainingJob.v1beta1.concertina.dev"
SYSTEM = ("kube-system", "kueue-system")
CERTIFICATES = "kueue/metrics/certs"
"""Folder below /etc in which Kueue requires a certificate for metrics."""
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


class Kueue(Controller):
    """Processes of Kueue's controller."""

    def __init__(self, kubeconfig: Path, client: Client, folder: Path, **configuration: Any) -> None:
        """Prepare the files of a controller.

        Args:
            configuration: Fields of Kueue's Configuration, such as waitForPodsReady.
        """
        assert PROGRAM
        super().__init__(PROGRAM, kubeconfig, client, folder, CERTIFICATES)
        self.configure(**configuration)

    def configure(self, **configuration: Any) -> None:
        """Write the configuration of the next start: defaults of the tests, and fields that are given."""
        self.configuration.write_text(yaml.safe_dump(self._configuration() | configuration))

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

    def limit(self, webhook: Object) -> None:
        """Exempt pods and jobs of the system."""
        if webhook["rules"][0]["apiGroups"] != ["kueue.x-k8s.io"]:
            webhook["namespaceSelector"] = not_in(SYSTEM)

    def register_webhooks(self) -> None:
        """Register all webhooks, and wait until the API server calls them."""
        super().register_webhooks()
        until(self._refuses, "the API server to call Kueue's webhooks", self.text)

    def _refuses(self) -> bool:
        path = f"{KUEUE}/namespaces/default/workloads?dryRun=All"
        try:
            self.client.call("POST", path, REFUSED_WORKLOAD)
        except ControlPlaneError as error:
            return "vworkload.kb.io" in str(error) and "at most one podSet" in str(error)
        return False


def not_in(namespaces: Sequence[str]) -> Object:
    """Return a label selector that excludes namespaces by name."""
    return {
        "matchExpressions": [
            {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": list(namespaces)},
        ]
    }
