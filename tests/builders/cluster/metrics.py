"""Server of external metrics for the HPA controller: external.metrics.k8s.io, aggregated by the real API server."""

from __future__ import annotations

import contextlib
import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from concertina.local.cluster import LocalCluster
from concertina.local.control_plane import certificates

GROUP = "external.metrics.k8s.io"
VERSION = f"{GROUP}/v1beta1"
SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"


class Metric:
    """One number, which a test sets."""

    name = "tokens_waiting"

    def __init__(self) -> None:
        self.value = 0
        self.asked = 0

    def answer(self, path: str) -> dict[str, Any]:
        if path == f"/apis/{VERSION}":
            resource = {"name": self.name, "kind": "ExternalMetricValueList", "namespaced": True, "verbs": ["get"]}
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": VERSION, "resources": [resource]}
        self.asked += 1
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        item = {"metricName": self.name, "metricLabels": {}, "timestamp": now, "value": str(self.value)}
        return {"kind": "ExternalMetricValueList", "apiVersion": VERSION, "metadata": {}, "items": [item]}


@contextlib.contextmanager
def served(cluster: LocalCluster, namespace: str, folder: Path) -> Iterator[Metric]:
    """Serve the metric, and register it with the API server until the block ends."""
    metric = Metric()
    pair = certificates.ClusterAuthority.create(folder / "metrics").issue("serving", "metrics", hosts=["localhost"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            known = path == f"/apis/{VERSION}" or path.endswith(f"/{metric.name}")
            body = json.dumps(metric.answer(path) if known else {}).encode()
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        _register(cluster, namespace, server.server_address[1])
        yield metric
    finally:
        cluster.api.call("DELETE", f"{SERVICES}/v1beta1.{GROUP}")
        server.shutdown()
        server.server_close()


def _register(cluster: LocalCluster, namespace: str, port: int) -> None:
    service = {"metadata": {"name": "metrics"}, "spec": {"type": "ExternalName", "externalName": "localhost"}}
    cluster.api.call("POST", f"/api/v1/namespaces/{namespace}/services", service)
    spec = {
        "group": GROUP,
        "version": "v1beta1",
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "insecureSkipTLSVerify": True,
        "service": {"name": "metrics", "namespace": namespace, "port": port},
    }
    body = {"metadata": {"name": f"v1beta1.{GROUP}"}, "spec": spec}
    cluster.api.call("POST", SERVICES, body)
    cluster.kubectl("wait", f"apiservice/v1beta1.{GROUP}", "--for=condition=Available", "--timeout=60s")
