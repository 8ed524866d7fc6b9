"""File in the volume with the highest round that this replica's agent has seen, and the claim of that round.

A round is a period in which a fixed set of replicas trains. The claim is the operator's decision to begin the round.
The file remains when the container restarts, so that the agent refuses requests for earlier rounds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from concertina_protocol.log import log_event


def read(volume: Path) -> tuple[int, str]:
    """Return the highest round that the agent has seen, and its claim. Return (0, "") without a valid file.

    Without the file, the agent behaves like the agent of a new pod. The agent still refuses requests for old rounds,
    because they name a different claim or a different instance id. A claim is the operator's decision to begin a round.
    Each start of an agent has an instance id of its own (decision "Agents without seen.json act like new pods").
    """
    try:
        record = json.loads((volume / "seen.json").read_text())
        return int(record["round"]), str(record["claim"])
    except FileNotFoundError:
        return 0, ""
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        log_event("seen_damaged", error=f"{type(error).__name__}: {error}")
        return 0, ""


def write(volume: Path, round: int, claim: str) -> None:
    """Write the highest round that the agent has seen, and the round's claim (the operator's decision to begin it).

    The file is replaced atomically. On return, the file and its name are synced to the disk.
    """
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
