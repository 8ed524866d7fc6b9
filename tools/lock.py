"""Pins what each environment holds, with hashes: `make lock` writes requirements/*.txt.

Everything comes from pyproject.toml; the operator's and the trainer's versions are those of the development lock. The
files name no package index, and hold for Python 3.11 to 3.13 on every platform.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
COMPILE = (
    *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"),
    *("--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url"),
)


def environments() -> dict[str, list[str]]:
    """What each environment is asked to hold. With what builds it: no net is needed then."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build, project = pyproject["build-system"]["requires"], pyproject["project"]
    extras = project["optional-dependencies"]
    return {
        "dev": [
            *build,
            *project["dependencies"],
            *extras["trainer"],
            *extras["tracking"],
            *extras["mlflow-server"],
            *extras["demo"],
            *extras["dev"],
        ],
        "operator": [*build, *project["dependencies"]],
        "trainer": [*build, *extras["trainer"], *extras["tracking"]],
        "agent": [*build, *extras["agent"]],
        "docs": extras["docs"],
    }


def main() -> None:
    upgrade = ["--upgrade"] if "--upgrade" in sys.argv[1:] else []
    subprocess.run([*COMPILE, *upgrade, REQUIREMENTS / "uv.in", "-o", REQUIREMENTS / "uv.txt"], check=True)
    for name, requirements in environments().items():
        target = REQUIREMENTS / f"{name}.txt"
        options = upgrade if name == "dev" else ["--constraint", str(REQUIREMENTS / "dev.txt")]
        text = "\n".join(requirements)
        subprocess.run([*COMPILE, *options, "-", "-o", target], input=text, text=True, check=True)
        print(f"{target.relative_to(ROOT)}: {sum('==' in line for line in target.read_text().splitlines())} packages")


if __name__ == "__main__":
    main()
