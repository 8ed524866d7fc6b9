"""Install the packages for GPU checks into a folder that can be copied to a machine without a network.

`python tools/gpu_packages.py FOLDER [VERSION]` installs into FOLDER/VERSION. The packages have the versions in the lock
file, and are for Linux on this machine's processor and for Python VERSION, such as 3.12. VERSION defaults to the
running Python. torch and numpy are not included. pip is required.
"""

from __future__ import annotations

import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = frozenset(
    (
        *("pytest", "iniconfig", "packaging", "pluggy", "pygments"),
        *("pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection"),
        *("cryptography", "cffi", "pycparser"),
        "obstore",
    )
)
PLATFORMS = "manylinux_2_28", "manylinux_2_17", "manylinux2014"


def locked(lock: str) -> str:
    """Return the part of a lock file for the packages in PACKAGES, with their hashes."""
    entries = {re.split("==", entry)[0]: entry for entry in re.split(r"\n(?=[a-z0-9])", lock) if "==" in entry}
    if missing := PACKAGES - entries.keys():
        sys.exit(f"requirements/dev.txt does not name {', '.join(sorted(missing))}")
    return "\n".join(entry for name, entry in entries.items() if name in PACKAGES) + "\n"


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    version = sys.argv[2] if len(sys.argv) == 3 else ".".join(map(str, sys.version_info[:2]))
    folder = pathlib.Path(sys.argv[1]) / version
    platforms = [f"--platform={name}_{platform.machine()}" for name in PLATFORMS]
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write(locked((ROOT / "requirements/dev.txt").read_text(encoding="utf-8")))
        requirements.flush()
        command = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--target", folder, "--python-version", version, *platforms, "--only-binary=:all:"),
            *("--no-deps", "--no-compile", "--require-hashes", "--requirement", requirements.name),
        ]
        if code := subprocess.run(command).returncode:
            sys.exit(code)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {len(PACKAGES)} packages for Python {version}, {size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
