"""Install the packages for GPU checks into folders that can be copied to a machine without a network.

`python tools/gpu_packages.py FOLDER [VERSION] [--titan TITAN_FOLDER]` installs into FOLDER/VERSION. With `--titan`, it
also installs torchtitan into TITAN_FOLDER/VERSION, where `benchmarks/trainer.py` looks for it. The packages have the
versions in the lock file (those of torchtitan also in `benchmarks/scripts/torchtitan.txt`), and are for Linux on this
machine's processor and for Python VERSION, such as 3.12. VERSION defaults to the running Python. torch, numpy and what
torch requires are not included. pip is required.
"""

from __future__ import annotations

import argparse
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = frozenset(
    (
        *("pytest", "iniconfig", "packaging", "pluggy", "pygments"),
        *("pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection"),
        *("cryptography", "cffi", "pycparser"),
        "obstore",
    )
)
TITAN = ROOT / "benchmarks/scripts/torchtitan.txt"
"""torchtitan and those of its requirements that the lock file does not have."""
TITAN_LOCKED = frozenset(
    (
        *("torchdata", "tokenizers", "safetensors", "huggingface-hub", "hf-xet", "tqdm", "pyyaml"),
        *("requests", "urllib3", "certifi", "charset-normalizer", "idna"),
        *("httpx", "httpcore", "httpx2", "httpcore2", "truststore", "h11", "anyio", "click"),
        *("aiohttp", "aiohappyeyeballs", "aiosignal", "attrs", "frozenlist", "multidict", "propcache", "yarl"),
        *("tensorboard", "tensorboard-data-server", "absl-py", "grpcio", "markdown", "pillow", "protobuf", "werkzeug"),
        *("pandas", "pyarrow", "xxhash", "python-dateutil", "tzdata"),
        *("rich", "markdown-it-py", "mdurl"),
    )
)
"""Requirements of torchtitan that the lock file has, without PACKAGES and what torch requires."""
PLATFORMS = "manylinux_2_28", "manylinux_2_17", "manylinux2014"


def locked(lock: str, names: Iterable[str] = PACKAGES) -> str:
    """Return the part of a lock file for the named packages, with their hashes."""
    entries = {re.split("==", entry)[0]: entry for entry in re.split(r"\n(?=[a-z0-9])", lock) if "==" in entry}
    wanted = frozenset(names)
    if missing := wanted - entries.keys():
        sys.exit(f"requirements/dev.txt does not name {', '.join(sorted(missing))}")
    return "\n".join(entry for name, entry in entries.items() if name in wanted) + "\n"


def install(folder: pathlib.Path, version: str, requirements: str) -> None:
    """Install packages, each with a version and hashes, into an empty folder.

    Raises:
        SystemExit: When pip fails, with its exit status.
    """
    platforms = [f"--platform={name}_{platform.machine()}" for name in PLATFORMS]
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(requirements)
        file.flush()
        command = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--target", folder, "--python-version", version, *platforms, "--only-binary=:all:"),
            *("--no-deps", "--no-compile", "--require-hashes", "--requirement", file.name),
        ]
        if code := subprocess.run(command).returncode:
            sys.exit(code)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    count = len(list(folder.glob("*.dist-info")))
    print(f"{folder}: {count} packages for Python {version}, {size / 2**20:.0f} MiB")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("version", nargs="?", default=".".join(map(str, sys.version_info[:2])))
    parser.add_argument("--titan", type=pathlib.Path, help="folder for torchtitan")
    options = parser.parse_args(arguments)
    lock = (ROOT / "requirements/dev.txt").read_text(encoding="utf-8")
    install(options.folder / options.version, options.version, locked(lock))
    if options.titan:
        requirements = locked(lock, TITAN_LOCKED) + TITAN.read_text(encoding="utf-8")
        install(options.titan / options.version, options.version, requirements)


if __name__ == "__main__":
    main()
