"""What the agent keeps on its volume: the highest round seen, and snapshots."""

from __future__ import annotations

import asyncio
import concurrent.futures
from pathlib import Path

from concertina_agent.core import events as e
from concertina_agent.files import seen
from concertina_agent.files.snapshot_files import SnapshotFiles


class FilesDriver:
    def __init__(self, volume: Path) -> None:
        """Raises OSError."""
        volume.mkdir(parents=True, exist_ok=True)
        self._volume = volume
        self.snapshots = SnapshotFiles(volume)
        self.seen = seen.read(volume)
        """By the agent before this one."""
        self._disk = concurrent.futures.ThreadPoolExecutor(1, "seen")
        self.persisted: asyncio.Future[None]
        """Of the last PersistSeen; one comes before every KillWorkers."""

    def persist_seen(self, effect: e.PersistSeen) -> None:
        """In a thread, one at a time: a disk that takes seconds keeps no beat waiting."""
        self.persisted = asyncio.get_running_loop().run_in_executor(
            self._disk, seen.write, self._volume, effect.round, effect.claim
        )

    def drop_snapshots(self, effect: e.DropSnapshots) -> None:
        self.snapshots.drop(effect.ids)
