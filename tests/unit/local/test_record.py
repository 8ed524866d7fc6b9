"""Loopback network of a cluster: no other cluster has it, whichever user's it is."""

import socket
from pathlib import Path

import pytest

from concertina.local.host import paths
from concertina.local.state import record


@pytest.fixture(autouse=True)
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paths, "clusters", lambda: tmp_path)
    return tmp_path


def cluster(clusters: Path, name: str) -> Path:
    folder = clusters / name
    folder.mkdir()
    return folder


def test_a_cluster_keeps_its_network_and_no_other_of_this_user_has_it(clusters: Path) -> None:
    folders = [cluster(clusters, f"c{number}") for number in range(100)]
    networks = [record.claim_network(folder) for folder in folders]
    assert len(set(networks)) == 100
    assert [record.claim_network(folder) for folder in folders] == networks


def test_a_network_at_which_another_user_listens_is_left_to_her(clusters: Path) -> None:
    folder = cluster(clusters, "mine")
    network = record.claim_network(folder)
    (folder / "network").unlink()
    with socket.create_server((f"{network}.7.9", 0)):
        assert record.claim_network(folder) != network
