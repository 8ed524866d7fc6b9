"""Comparison of the recordings of Kueue's answers with the real controller.

After a change of Kueue's version, `CONCERTINA_RECORD=write` writes the recordings anew. Review the difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from builders.cluster import kueue
from builders.cluster.controllers import serving
from builders.cluster.kueue_scenarios import (
    NAMESPACE,
    SCENARIOS,
    create_queues,
    differences,
    recorded,
    write_recording,
)
from builders.cluster.protocol import Player, Recorder, table
from builders.cluster.queues import KUEUE, Client
from builders.until import until
from concertina.local.binaries import programs
from concertina.local.cluster import LocalCluster
from concertina.local.host import paths

pytestmark = [
    kueue.needed,
    pytest.mark.long(law="tests/unit/repository/test_kueue_recordings.py::test_no_quota_is_reserved_twice"),
]
WRITE = os.environ.get("CONCERTINA_RECORD") == "write"


@pytest.fixture(scope="module")
def client(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Yield a client of Kueue with its queues, and a namespace of a fixed name."""
    client = Client.of_local(cluster)
    with serving(kueue.Kueue(cluster.kubeconfig, client, tmp_path_factory.mktemp("kueue"))):
        cluster.create_namespace(NAMESPACE)
        create_queues(client)
        yield client
        cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_kueue_answers_as_recorded(client: Client, scenario: Callable[[Player], None]) -> None:
    recorder = Recorder()
    player = Player(client, NAMESPACE, recorder)
    try:
        with player.recording():
            scenario(player)
            player.settle()
    finally:
        print(table(recorder.entries))
        _remove_all(client)
    if WRITE:
        version = programs.version(programs.KUEUE, paths.checkout() / "tools" / "kueue")
        write_recording(version, scenario.__name__, recorder.steps())
    assert not differences(recorded()[scenario.__name__], recorder.steps())


def _remove_all(client: Client) -> None:
    path = f"{KUEUE}/namespaces/{NAMESPACE}/workloads"
    for item in client.call("GET", path)["items"]:
        Player(client, NAMESPACE, Recorder()).remove(item["metadata"]["name"])
    until(lambda: not client.call("GET", path)["items"], "the end of all Workloads")
