"""Files that the agent keeps in its volume: the highest round seen, and snapshots."""

from __future__ import annotations

import asyncio
import concurrent.futures
from pathlib import Path

from concertina_agent.core import events as e
from concertina_agent.files import seen
from concertina_agent.files.snapshot_files import SnapshotFiles


class FilesDriver:
    """Driver that carries out the effects on the volume."""

    def __init__(self, volume: Path) -> None:
        """Read the volume, and create it if needed.

        Raises OSError if that fails.
        """
        volume.mkdir(parents=True, exist_ok=True)
        self._volume = volume
        self.snapshots = SnapshotFiles(volume)
        self.seen = seen.read(volume)
        """Highest round and claim that the previous agent of this replica had seen."""
        self._disk = concurrent.futures.ThreadPoolExecutor(1, "seen")
        self.persisted: asyncio.Future[None]
        """Future of the last PersistSeen. One precedes every KillWorkers."""

    def persist_seen(self, effect: e.PersistSeen) -> None:
        """Write the highest round in a thread, one write at a time, so that a slow disk does not delay heartbeats."""
        self.persisted = asyncio.get_running_loop().run_in_executor(
            self._disk, seen.write, self._volume, effect.round, effect.claim
        )

    def drop_snapshots(self, effect: e.DropSnapshots) -> None:
        self.snapshots.drop(effect.ids)
