"""Cache of data, with a folder for each user of the machine."""

import os
import subprocess
import sys
import zlib

import pytest

from builders.programs import SEARCH_PATH
from concertina_data.cache import Stored
from concertina_data.files import ManifestFile
from concertina_data.places import CacheSettings, folder_on_node

UNSHARE = ["unshare", "--user", "--map-user", "4321"]


def test_a_user_has_one_folder_inside_and_outside_of_a_user_namespace(monkeypatch):
    monkeypatch.delenv("CONCERTINA_CACHE", raising=False)
    if subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make a user namespace")
    script = "import os; from concertina_data.places import folder_on_node; print(os.getuid(), folder_on_node())"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": SEARCH_PATH}
    if "TMPDIR" in os.environ:
        environment["TMPDIR"] = os.environ["TMPDIR"]
    inside = subprocess.run(
        [*UNSHARE, sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert inside.stdout.split() == ["4321", str(folder_on_node())]


class Robbed(Stored):
    """Data set whose drafts another process deletes while they are written, as an older release does."""

    def _room_for(self, path, size):
        draft = super()._room_for(path, size)
        path.with_suffix(".draft").unlink()
        return draft


def test_a_file_whose_draft_another_process_deletes_is_read_and_not_kept(tmp_path):
    content, (stored, folder) = b"content", (tmp_path / name for name in ("stored", "cache"))
    stored.mkdir()
    (stored / "a.bin").write_bytes(content)
    data = Robbed(stored.as_uri(), CacheSettings(1 << 20, folder=folder))
    assert data.open(ManifestFile("a.bin", len(content), "0" * 64, zlib.crc32(content)))[:] == content
    assert not [*folder.glob("*.data"), *folder.glob("*.draft")]
