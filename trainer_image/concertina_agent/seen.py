"""The highest round and claim that this replica has seen, kept in its volume across restarts of the container."""

from __future__ import annotations

import json
import os
from pathlib import Path


def read(volume: Path) -> tuple[int, str]:
    """(0, "") where nothing has been seen."""
    try:
        kept = json.loads((volume / "seen.json").read_text())
    except FileNotFoundError:
        return 0, ""
    return int(kept["round"]), str(kept["claim"])


def write(volume: Path, round: int, claim: str) -> None:
    """On the disk when it returns; never half written."""
    draft = volume / "seen.json.new"
    with draft.open("w") as file:
        json.dump({"round": round, "claim": claim}, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(volume / "seen.json")
