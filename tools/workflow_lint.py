"""Check .github/workflows: actionlint reads their syntax and expressions, zizmor their security.

`make lint` runs this script. Without the two programs nothing is checked: `make workflow-linters` provides them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from concertina.local.binaries import programs

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
DEPENDABOT = ROOT / ".github" / "dependabot.yml"
CONFIGURATION = ROOT / ".github" / "zizmor.yml"


def linters() -> dict[str, str]:
    """Return the paths of the programs that are there, by name."""
    zizmor = shutil.which("zizmor", path=str(Path(sys.executable).parent)) or shutil.which("zizmor")
    paths = {name: str(path) for name, path in programs.ready(programs.ACTIONLINT).items()}
    return paths | ({"zizmor": zizmor} if zizmor else {})


def commands(found: dict[str, str], files: list[Path]) -> list[list[str]]:
    """Return the commands that check the workflows. zizmor reads Dependabot's settings too."""
    names = [str(path) for path in files]
    # Linters that a machine may have or lack must not change the result.
    actionlint = [found["actionlint"], "-no-color", "-shellcheck=", "-pyflakes="]
    zizmor = [found["zizmor"], "--offline", "--quiet", "--no-progress", "--config", str(CONFIGURATION)]
    # By name: in a copy without .git zizmor would also read what packages in .venv bring along.
    return [[*actionlint, *names], [*zizmor, *names, str(DEPENDABOT)]]


def main() -> int:
    paths = linters()
    missing = {"actionlint", "zizmor"} - paths.keys()
    if missing:
        print(f"workflows are not checked, as {' and '.join(sorted(missing))} is missing: run `make workflow-linters`")
        return 0
    files = sorted(WORKFLOWS.glob("*.yml"))
    return max(subprocess.run(command, cwd=ROOT, check=False).returncode for command in commands(paths, files))


if __name__ == "__main__":
    sys.exit(main())
