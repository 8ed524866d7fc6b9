"""Pin the packages of each environment with hashes. `make lock` writes the files in requirements/.

The requirements come from the pyproject.toml files of the workspace. The images use the versions of the development
lock file. The lock files contain no package index, and work with Python 3.11 to 3.13 on every platform.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tomllib

from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
COMPILE = (
    *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"),
    *("--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url"),
)
ENVIRONMENTS = {
    "operator": ["concertina-operator"],
    "agent": ["concertina-agent", "concertina-sdk[storage]"],
    "trainer": ["concertina-trainer[data,torch]", "concertina-agent[tracking]"],
    "cli": ["concertina-cli"],
}
"""Distributions of each environment, with their extras. `tools/install-environment.sh` installs the same."""


def members() -> dict[str, pathlib.Path]:
    """Return the folder of each distribution in the workspace, by distribution name."""
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]
    files = sorted(file for glob in globs for file in ROOT.glob(f"{glob}/pyproject.toml"))
    return {tomllib.loads(file.read_text())["project"]["name"]: file.parent for file in files}


def closure(asked: list[str]) -> tuple[list[str], list[str]]:
    """Return the workspace distributions on which `asked` depends, and their external requirements."""
    folders = members()
    waiting, seen, foreign = [Requirement(line) for line in asked], set[str](), set[str]()
    while waiting:
        wanted = waiting.pop()
        if wanted.name not in folders:
            foreign.add(str(wanted))
            continue
        if str(wanted) in seen:
            continue
        seen.add(str(wanted))
        project = tomllib.loads((folders[wanted.name] / "pyproject.toml").read_text())["project"]
        lines = [*project["dependencies"]]
        for extra in wanted.extras:
            lines += project["optional-dependencies"][extra]
        waiting += map(Requirement, lines)
    return sorted({Requirement(line).name for line in seen}), sorted(foreign)


def environments() -> dict[str, list[str]]:
    """Return the external requirements of each environment. The development environment includes all of them."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    everything = []
    for name, folder in members().items():
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        extras = ",".join(project.get("optional-dependencies", ()))
        everything.append(f"{name}[{extras}]" if extras else name)
    # setuptools is included so that builds need no network
    setuptools = [line for line in groups["build"] if Requirement(line).name != "uv"]
    dev = [*setuptools, *closure(everything)[1], *groups["mlflow-server"], *groups["dev"]]
    return {
        "dev": dev,
        **{name: closure(asked)[1] for name, asked in ENVIRONMENTS.items()},
        "docs": groups["docs"],
        "build": groups["build"],
    }


def main() -> None:
    upgrade = ["--upgrade"] if "--upgrade" in sys.argv[1:] else []
    for name, requirements in environments().items():
        target = REQUIREMENTS / f"{name}.txt"
        options = upgrade if name == "dev" else ["--constraint", str(REQUIREMENTS / "dev.txt")]
        text = "\n".join(requirements)
        subprocess.run([*COMPILE, *options, "-", "-o", target], input=text, text=True, check=True)
        print(f"{target.relative_to(ROOT)}: {sum('==' in line for line in target.read_text().splitlines())} packages")


if __name__ == "__main__":
    main()
