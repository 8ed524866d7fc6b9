"""Driver of the files in the agent's volume, which are snapshots and the highest round seen.

The driver carries out the effects of the state machine that concern files.

A round is a period in which a fixed set of replicas trains. A snapshot is a copy of the training state in node memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from pathlib import Path

from concertina_agent.core import events as e
from concertina_agent.files import seen
from concertina_agent.files.snapshot_files import SnapshotFiles


class FilesDriver:
    """Driver of the files in the agent's volume.

    The driver carries out the effects of the state machine that concern files.
    """

    def __init__(self, volume: Path) -> None:
        """Read the volume's contents. If the volume's folder does not exist, create it.

        Raises OSError if the folder can't be created or read.
        """
        volume.mkdir(parents=True, exist_ok=True)
        self._volume = volume
        self.snapshots = SnapshotFiles(volume)
        self.seen = seen.read(volume)
        """Highest round and claim that earlier starts of this replica's agent have seen."""
        self._disk = concurrent.futures.ThreadPoolExecutor(1, "seen")
        self.persisted: asyncio.Future[None]
        """Future that completes when the last PersistSeen is written. Each KillWorkers follows a PersistSeen."""

    def persist_seen(self, effect: e.PersistSeen) -> None:
        """Write the highest round to the volume in a thread, so that a slow disk does not delay heartbeats.

        Writes happen one at a time.
        """
        self.persisted = asyncio.get_running_loop().run_in_executor(
            self._disk, seen.write, self._volume, effect.round, effect.claim
        )

    def drop_snapshots(self, effect: e.DropSnapshots) -> None:
        self.snapshots.drop(effect.ids)
