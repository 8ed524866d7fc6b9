"""Where the programs lie that tests start. Whoever starts one has the folder on its PYTHONPATH, so that agents, forked
workers and pods find it. It is no package: py-spy would put its name before a script's."""

import os
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
FAULTS, STAND_IN = PROGRAMS / "faults", PROGRAMS / "stand_in"
AUDIO = Path(__file__).resolve().parents[2] / "examples" / "audio"
"""A model of a user's own, as in her image."""
SEARCH_PATH = os.pathsep.join([str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])])
"""Where agents and workers find their code: that of this checkout, where PYTHONPATH says so, whatever is installed."""
