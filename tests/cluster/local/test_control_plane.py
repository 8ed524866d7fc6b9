"""Access of other users of the machine, which reach the loopback addresses of a cluster but must not get data there."""

import http.client
import json
import ssl
from typing import cast

import pytest

from concertina.local.cluster import LocalCluster

ALL_KEYS = json.dumps({"key": "AA==", "range_end": "AA==", "count_only": True})
ASKED = pytest.mark.parametrize(("port", "path"), [("etcd", "/v3/kv/range"), ("etcd_peer", "/version")])


def answer(connection: http.client.HTTPConnection, path: str) -> int:
    """Return the status of the response, or 0 if nothing answers."""
    try:
        connection.request(*(("POST", path, ALL_KEYS) if path.startswith("/v3") else ("GET", path)))
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def tls(cluster: LocalCluster) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(cluster.directory / "pki" / "ca.crt"))


def port_of(cluster: LocalCluster, port: str) -> int:
    return cast(int, getattr(cluster.record.endpoints, port))


@ASKED
def test_etcd_answers_nobody_without_a_certificate(cluster: LocalCluster, port: str, path: str) -> None:
    place = (cluster.record.endpoints.address, port_of(cluster, port))
    assert answer(http.client.HTTPConnection(*place, timeout=10), path) in (0, 400)
    assert answer(http.client.HTTPSConnection(*place, timeout=10, context=tls(cluster)), path) == 0


@ASKED
def test_etcd_answers_the_api_server(cluster: LocalCluster, port: str, path: str) -> None:
    context, pki = tls(cluster), cluster.directory / "pki"
    context.load_cert_chain(pki / "etcd-client.crt", pki / "etcd-client.key")
    place = (cluster.record.endpoints.address, port_of(cluster, port))
    assert answer(http.client.HTTPSConnection(*place, timeout=10, context=context), path) == 200


def test_a_cluster_keeps_its_folder_to_itself(cluster: LocalCluster) -> None:
    assert cluster.directory.stat().st_mode & 0o777 == 0o700
