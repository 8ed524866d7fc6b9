"""The highest round and claim that this replica has seen, kept in its volume across restarts of the container."""

from __future__ import annotations

import json
import os
from pathlib import Path

from concertina_protocol.log import log_event


def read(volume: Path) -> tuple[int, str]:
    """(0, "") where nothing has been seen, or what was kept can't be read: then this agent knows as much as that of a
    new pod, and no more is needed of it: claims and instance ids keep old rounds from coming back (decision "A lost
    memory of rounds is that of a new pod")."""
    try:
        kept = json.loads((volume / "seen.json").read_text())
        return int(kept["round"]), str(kept["claim"])
    except FileNotFoundError:
        return 0, ""
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        log_event("seen_damaged", error=f"{type(error).__name__}: {error}")
        return 0, ""


def write(volume: Path, round: int, claim: str) -> None:
    """On the disk when it returns, its name included; never half written."""
    draft = volume / "seen.json.new"
    with draft.open("w") as file:
        json.dump({"round": round, "claim": claim}, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(volume / "seen.json")
    folder = os.open(volume, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
