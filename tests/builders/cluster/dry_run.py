"""Server-side dry run of a manifest."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from concertina.local.binaries import programs
from concertina.local.cluster import LocalCluster


def refused(cluster: LocalCluster, namespace: str, manifest: dict[str, Any]) -> str:
    """Return why the API server refuses a manifest under strict validation, or an empty string."""
    kubectl = str(programs.ready(programs.CONTROL_PLANE)["kubectl"])
    arguments = ["apply", "--server-side", "--dry-run=server", "--validate=strict", "-n", namespace, "-f", "-"]
    done = subprocess.run(
        [kubectl, *arguments],
        env=os.environ | {"KUBECONFIG": str(cluster.kubeconfig)}, input=json.dumps(manifest),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stderr if done.returncode else ""
