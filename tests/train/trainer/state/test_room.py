"""The memory that a job is checked for is enough in every round."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from builders.train import node
from concertina.local.host import linux_namespaces
from programs import tight_volume


@pytest.mark.parametrize(
    "story",
    [tight_volume.an_upload_hangs, tight_volume.a_peer_s_copy_has_room, tight_volume.memory_comes_back_slowly],
)
def test_a_round_after_a_failure_has_room_though(story, tmp_path):
    def give_room() -> None:
        linux_namespaces.enter_node()
        linux_namespaces.mount("tmpfs", str(tmp_path), "tmpfs", 0, f"size={tight_volume.ROOM}")

    search = os.pathsep.join([str(Path(tight_volume.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    inside = ["sh", "-c", '"$@"; exit $?', "sh"]  # its child is in the namespace of processes
    done = subprocess.run(
        [*inside, sys.executable, tight_volume.__file__, story.__name__, tmp_path],
        env={**os.environ, "PYTHONPATH": search}, preexec_fn=give_room, stderr=subprocess.PIPE, text=True,
        timeout=node.GIVE_UP,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
