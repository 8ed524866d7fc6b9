"""Installation of the packages of other tools, which are no dependencies of this project."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


def install(folder: Path, *packages: Sequence[str]) -> Path:
    """Return `folder`, and install the packages there if it is empty or missing.

    Each item of `packages` has the arguments of one call of `uv pip install`, because options such as `--no-deps` hold
    for a whole call. The packages are installed into a draft, which gets the name `folder` once it is complete.

    Raises:
        CalledProcessError: When a package can't be installed. `folder` is not created then.
    """
    if any(folder.glob("*")):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.draft-", dir=folder.parent))
    try:
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
        for arguments in packages:
            subprocess.run([*command, "--target", str(draft), *arguments], check=True)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft)
        raise
    return folder
