"""Checks before the cluster of a folder that several machines share is taken down."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from concertina.local import cluster as local
from concertina.local.errors import LocalClusterError
from concertina.local.host import paths, processes
from concertina.local.state import lifetime

ELSEWHERE = "belongs to a cluster on login-2: use it and take it down there. If it no longer runs there"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a state folder in which a process was started."""
    monkeypatch.setattr(paths, "clusters", lambda: tmp_path)
    folder = tmp_path / "shared"
    lifetime.spawn(folder, "sleeper", ["sleep", "600"])
    yield folder
    processes.kill(processes.marked(folder))


def lives_on(folder: Path, host: str) -> None:
    """Make the folder that of another machine, on which alone its processes are visible."""
    (folder / "host").write_text(host)
    processes.kill(processes.marked(folder))


def test_a_cluster_of_another_machine_is_left_alone(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lives_on(folder, "login-2")
    held = sorted(path.name for path in folder.iterdir())
    with pytest.raises(LocalClusterError, match=ELSEWHERE):
        local.down("shared")
    with pytest.raises(LocalClusterError, match=ELSEWHERE):
        local.attach("shared")
    with pytest.raises(LocalClusterError, match=ELSEWHERE), lifetime.guarded("shared"):
        pytest.fail("it is somebody's")
    with pytest.raises(LocalClusterError, match=ELSEWHERE):
        lifetime.spawn(folder, "sleeper", ["sleep", "600"])
    assert sorted(path.name for path in folder.iterdir()) == held
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("host", [socket.gethostname(), ""])  # The machine lost power during the write.
def test_what_this_machine_left_goes(folder: Path, host: str) -> None:
    lives_on(folder, host)
    local.down("shared")
    assert [path.name for path in folder.iterdir()] == ["logs"]


def test_a_machine_that_is_called_otherwise_by_now_takes_its_own_down(folder: Path) -> None:
    (folder / "host").write_text("login-2")
    local.down("shared")
    assert [path.name for path in folder.iterdir()] == ["logs"]
    assert not processes.marked(folder)
