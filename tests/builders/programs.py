"""Paths of the programs that tests start.

A test that starts one puts the folder on its PYTHONPATH, so that agents, forked workers and pods find it. The folder is
not a package, because py-spy would put its name before a script's.
"""

import os
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
FAULTS, STAND_IN = PROGRAMS / "faults", PROGRAMS / "stand_in"
AUDIO = Path(__file__).resolve().parents[2] / "examples" / "audio"
"""Folder of a user's own model, as in the user's image."""
CLICKS = Path(__file__).resolve().parents[2] / "examples" / "clicks"
EMBEDDINGS = Path(__file__).resolve().parents[2] / "examples" / "embeddings"
PREPARE = Path(__file__).resolve().parents[2] / "examples" / "prepare"
AUDIO_FIELDS = ("--field", "features=float16x20", "--tokens", "targets", "--vocab-size", "8")
"""Options of `concertina data build` for the recordings of AUDIO."""
SEARCH_PATH = os.pathsep.join([str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])])
"""Path from which agents and workers import their code: this checkout's folders, if PYTHONPATH says so, whatever is
installed."""
