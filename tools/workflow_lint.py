"""Check .github/workflows: actionlint checks syntax and expressions, and zizmor checks security.

`make lint` runs this script. If one of the two programs is missing, nothing is checked. `make workflow-linters`
installs them.
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
    """Return the paths of the installed linters, by name."""
    zizmor = shutil.which("zizmor", path=str(Path(sys.executable).parent)) or shutil.which("zizmor")
    paths = {name: str(path) for name, path in programs.ready(programs.ACTIONLINT).items()}
    return paths | ({"zizmor": zizmor} if zizmor else {})


def commands(found: dict[str, str], files: list[Path]) -> list[list[str]]:
    """Return the commands that check the workflows. zizmor also checks Dependabot's configuration."""
    names = [str(path) for path in files]
    # Optional linters are disabled, so that the result is the same on every machine.
    actionlint = [found["actionlint"], "-no-color", "-shellcheck=", "-pyflakes="]
    zizmor = [found["zizmor"], "--offline", "--quiet", "--no-progress", "--config", str(CONFIGURATION)]
    # The files are listed because zizmor would otherwise also check files of packages in .venv, in a copy without .git.
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
