"""The manifests of docs/queues.md, on an API server with Kueue's CRDs and webhooks."""

from __future__ import annotations

import copy

import pytest

from builders import pages
from builders.cluster import kueue as kueue_builder
from builders.cluster.dry_run import refused
from builders.cluster.queues import API_VERSION
from concertina.local.cluster import LocalCluster

LAW = "tests/unit/repository/test_site.py::test_queues_of_the_page_have_the_form_of_those_that_kueue_admits"
SHOWN = {
    document["kind"]: document
    for block in pages.blocks(pages.DOCS / "queues.md")
    for document in block.manifests
    if document.get("apiVersion") == API_VERSION
}
pytestmark = [kueue_builder.needed, pytest.mark.long(law=LAW), pytest.mark.usefixtures("kueue")]


@pytest.mark.parametrize("kind", sorted(SHOWN))
def test_the_manifest_passes_a_server_side_dry_run(cluster: LocalCluster, namespace: str, kind: str) -> None:
    manifest = copy.deepcopy(SHOWN[kind])
    if "namespace" in manifest["metadata"]:
        manifest["metadata"]["namespace"] = namespace
    assert not refused(cluster, namespace, manifest)
    manifest["unknown"] = 1
    assert "unknown" in refused(cluster, namespace, manifest)
