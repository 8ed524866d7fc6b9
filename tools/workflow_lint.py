"""Check .github/workflows: actionlint checks syntax and expressions, and zizmor checks security.

`make lint` runs this script. If a program is missing, the other one still runs, and the script names the missing one.
If the variable CI is set, as on GitHub, a missing program is an error. `make workflow-linters` installs both.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from concertina.local.binaries import programs

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
DEPENDABOT = ROOT / ".github" / "dependabot.yml"
CONFIGURATION = ROOT / ".github" / "zizmor.yml"
LINTERS = ("actionlint", "zizmor")


def linters() -> dict[str, str]:
    """Return the paths of the installed linters, by name."""
    zizmor = shutil.which("zizmor", path=str(Path(sys.executable).parent)) or shutil.which("zizmor")
    paths = {name: str(path) for name, path in programs.ready(programs.ACTIONLINT).items()}
    return paths | ({"zizmor": zizmor} if zizmor else {})


def commands(found: dict[str, str], files: list[Path]) -> list[list[str]]:
    """Return the commands that check the workflows, one for each linter that is installed.

    zizmor also checks Dependabot's configuration.
    """
    names = [str(path) for path in files]
    arguments = {
        # Optional linters are disabled, so that the result is the same on every machine.
        "actionlint": ["-no-color", "-shellcheck=", "-pyflakes=", *names],
        # The files are listed because zizmor would otherwise also check files of packages in .venv, in a copy without
        # .git.
        "zizmor": ["--offline", "--quiet", "--no-progress", "--config", str(CONFIGURATION), *names, str(DEPENDABOT)],
    }
    return [[found[name], *arguments[name]] for name in LINTERS if name in found]


def main() -> int:
    found = linters()
    missing = [name for name in LINTERS if name not in found]
    if missing:
        print(f"workflows are not checked by {' and '.join(missing)}: run `make workflow-linters`")
    files = sorted(WORKFLOWS.glob("*.yml"))
    codes = [subprocess.run(command, cwd=ROOT, check=False).returncode for command in commands(found, files)]
    required = bool(os.environ.get("CI"))
    return int(any(codes) or (required and bool(missing)))


if __name__ == "__main__":
    sys.exit(main())
