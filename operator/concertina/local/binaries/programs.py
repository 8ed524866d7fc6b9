"""The programs that the local cluster and tests run, each found or made in this order: $KUBEBUILDER_ASSETS and PATH
(where its version fits), our cache, the official release, a build from the Go modules pinned in tools/.

The cache is shared between checkouts. A set of programs lies in a folder named after its version and the digest of its
go.mod and go.sum; it appears there whole (renamed into place) and under a lock: two checkouts can set up side by side.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from concertina.local.binaries import gobuild, release
from concertina.local.errors import LocalClusterError
from concertina.local.host import paths
from concertina.local.state import record as state

Say = Callable[[str], None]


@dataclass(frozen=True)
class Program:
    """A program: how it tells its version, and which versions (a regular expression on what it says) will do."""

    version_arguments: tuple[str, ...]
    fits: str


@dataclass(frozen=True)
class Bundle:
    """Programs that are built from one Go module, a folder in tools/."""

    module: str
    programs: Mapping[str, Program]
    renamed: Mapping[str, str]  # of what `go build` names otherwise: its name there
    version_module: str  # its version in go.mod is that of the release, and is stamped into the programs


_KUBERNETES = r"v1\.36\."
CONTROL_PLANE = Bundle(
    module="controlplane",
    programs={
        "etcd": Program(("--version",), r"etcd Version: 3\.(6|7|8|9)\."),
        "kube-apiserver": Program(("--version",), _KUBERNETES),
        "kube-controller-manager": Program(("--version",), _KUBERNETES),
        "kube-scheduler": Program(("--version",), _KUBERNETES),
        "kubectl": Program(("version", "--client"), rf"Client Version: {_KUBERNETES}"),
    },
    renamed={"etcd": "server"},
    version_module="k8s.io/kubernetes",
)
HELM = Bundle(
    module="helm",
    programs={"helm": Program(("version", "--short"), r"v(3\.(1[4-9]|[2-9]\d)|4)\.")},
    renamed={},
    version_module="helm.sh/helm/v4",
)
PROMETHEUS = Bundle(
    module="prometheus",
    programs={name: Program(("--version",), r"version (2\.(4[2-9]|5\d)|3)\.") for name in ("prometheus", "promtool")},
    renamed={},
    version_module="github.com/prometheus/prometheus",
)
"""For tests of dashboards and alerts alone, so set-up leaves it out."""
VALE = Bundle(
    module="vale",
    programs={"vale": Program(("--version",), r"vale version 3\.(2[2-9]|[3-9]\d)\.")},
    renamed={},
    version_module="github.com/vale-cli/vale/v3",
)
"""For `make lint` alone, so set-up leaves it out."""


def control_plane(say: Say) -> dict[str, Path]:
    """etcd, kube-apiserver, kube-controller-manager, kube-scheduler and kubectl, by name."""
    return find(CONTROL_PLANE, say)


def helm(say: Say) -> Path:
    """The helm program."""
    return find(HELM, say)["helm"]


def run_helm(kubeconfig: Path, *arguments: str) -> str:
    """Run helm on a cluster; returns what it prints. Raises LocalClusterError with what it complains about."""
    command = [str(helm(lambda _: None)), f"--kubeconfig={kubeconfig}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise LocalClusterError(f"helm {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def find(bundle: Bundle, say: Say) -> dict[str, Path]:
    """All programs of a bundle, made if need be. Raises LocalClusterError when they can't be had: why, what to do."""
    found = {name: path for name, program in bundle.programs.items() if (path := installed(name, program))}
    if len(found) < len(bundle.programs):
        made = cached(bundle, say)
        found |= {name: made / name for name in bundle.programs if name not in found}
    return found


def ready(bundle: Bundle) -> dict[str, Path]:
    """The same where none has to be made; else nothing."""
    found = {name: path for name, program in bundle.programs.items() if (path := installed(name, program))}
    if len(found) < len(bundle.programs) and (made := _target(bundle, _module(bundle))).exists():
        found |= {name: made / name for name in bundle.programs if name not in found}
    return found if len(found) == len(bundle.programs) else {}


def installed(name: str, program: Program) -> Path | None:
    """The program in $KUBEBUILDER_ASSETS or on PATH, if its version fits."""
    folders = [os.environ.get("KUBEBUILDER_ASSETS", ""), os.environ.get("PATH", "")]
    path = shutil.which(name, path=os.pathsep.join(filter(None, folders)))
    if path is None:
        return None
    try:
        said = subprocess.run(
            [path, *program.version_arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Path(path) if re.search(program.fits, said.stdout) else None


def version(bundle: Bundle, module: Path) -> str:
    """The version ("v1.36.3") that the module's go.mod requires of the bundle's main dependency."""
    required = re.search(rf"\b{re.escape(bundle.version_module)} (v\S+)", (module / "go.mod").read_text())
    if not required:
        raise LocalClusterError(f"{module / 'go.mod'} does not require {bundle.version_module}.")
    return required[1]


def cached(bundle: Bundle, say: Say) -> Path:
    """The folder of the bundle's programs in our cache, filled first if they are not there."""
    module = _module(bundle)
    target = _target(bundle, module)
    if target.exists():
        return target
    lock = target.with_name(f".{target.name}.lock")
    say(f"preparing {bundle.module} {version(bundle, module)}")
    with state.locked(lock):
        if not target.exists():  # nobody else made it while we waited
            fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            try:
                _fill(bundle, module, fresh, say)
                fresh.chmod(0o755)
                fresh.rename(target)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
    return target


def _module(bundle: Bundle) -> Path:
    module = paths.checkout() / "tools" / bundle.module
    if not (module / "go.mod").exists():
        wanted = ", ".join(bundle.programs)
        raise LocalClusterError(
            f"{wanted} are not on PATH, and {module} is not there to build them: use a source checkout."
        )
    return module


def _target(bundle: Bundle, module: Path) -> Path:
    digest = hashlib.sha256((module / "go.mod").read_bytes() + (module / "go.sum").read_bytes()).hexdigest()[:12]
    return paths.cache() / "binaries" / f"{bundle.module}-{version(bundle, module)}-{digest}"


def _fill(bundle: Bundle, module: Path, folder: Path, say: Say) -> None:
    try:
        release.download(bundle.module, version(bundle, module), gobuild.required(module), folder, say)
        return
    except release.Unavailable as error:
        say(f"{error}; building from source instead")
    for path in folder.iterdir():  # half a download
        path.unlink()
    gobuild.build(module, version(bundle, module), folder, say)
    for name, built in bundle.renamed.items():
        (folder / built).rename(folder / name)
