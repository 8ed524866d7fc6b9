"""Programs that the local cluster and the tests run: where they are found, and how missing ones are provided.

Each program is searched for in this order: $KUBEBUILDER_ASSETS and PATH (if the version is suitable), concertina's
cache, the official release, and a build from the Go modules pinned in tools/.

All checkouts share the cache. The cache folder of a set of programs is named after their version and the digest of
their go.mod and go.sum. It is created under a lock and appears complete (by a rename), so two checkouts can be set up
at the same time.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from concertina.local.binaries import gobuild, release
from concertina.local.errors import LocalClusterError
from concertina.local.host import paths
from concertina.local.state import record as state

Say = Callable[[str], None]


@dataclass(frozen=True)
class Program:
    """Check of the version of a program: the arguments, and a pattern that the output must match."""

    version_arguments: tuple[str, ...]
    fits: str


@dataclass(frozen=True)
class Bundle:
    """Programs that are built from the same Go module in tools/."""

    module: str
    programs: Mapping[str, Program]
    renamed: Mapping[str, str]  # name by `go build` of programs whose name differs
    version_module: str  # its version in go.mod is the release's, and is linked into the programs
    files: Mapping[str, str] = field(default_factory=dict)  # name in the cache of files and folders of version_module


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
NEXT_KUBERNETES = Bundle(
    module="kubernetes-1.37",
    programs={
        name: Program(("--version",), r"v1\.37\.")
        for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
    },
    renamed={},
    version_module="k8s.io/kubernetes",
)
"""Control plane of the next Kubernetes version. Only long tests use it, so set-up does not provide it."""
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
"""Prometheus and promtool. Only tests of dashboards and alerts use them, so set-up does not provide them."""
VALE = Bundle(
    module="vale",
    programs={"vale": Program(("--version",), r"vale version 3\.(2[2-9]|[3-9]\d)\.")},
    renamed={},
    version_module="github.com/vale-cli/vale/v3",
)
"""Vale. Only `make lint` uses it, so set-up does not provide it."""
ACTIONLINT = Bundle(
    module="actionlint",
    programs={"actionlint": Program(("--version",), r"v?1\.(7\.(1[2-9]|[2-9]\d)|[89]|\d\d)")},
    renamed={},
    version_module="github.com/rhysd/actionlint",
)
"""actionlint. Only `make lint` uses it, so set-up does not provide it."""
KIND = Bundle(
    module="kind",
    programs={"kind": Program(("version",), r"kind v0\.(3[3-9]|[4-9]\d)\.")},
    renamed={},
    version_module="sigs.k8s.io/kind",
)
"""kind. Only `make kind` uses it, so set-up does not provide it."""
KUEUE = Bundle(
    module="kueue",
    # Kueue does not print its version, and the manifests must have the same one: never use a program on PATH.
    programs={"kueue": Program(("--help",), r"(?!)")},
    renamed={},
    version_module="sigs.k8s.io/kueue",
    files={"crds": "config/components/crd/bases", "webhooks.yaml": "config/components/webhook/manifests.yaml"},
)
"""Kueue's controller and its manifests. Only long tests use them, so set-up does not provide them."""
JOBSET = Bundle(
    module="jobset",
    # JobSet does not print its version either.
    programs={"jobset": Program(("--help",), r"(?!)")},
    renamed={},
    version_module="sigs.k8s.io/jobset",
    files={"crds": "config/components/crd/bases", "webhooks.yaml": "config/components/webhook/manifests.yaml"},
)
"""JobSet's controller and its manifests. Only benchmarks/queues.py uses them, so set-up does not provide them."""


def control_plane(say: Say) -> dict[str, Path]:
    """Return the paths of the control plane's programs and of kubectl, keyed by the program's name.

    They are etcd, kube-apiserver, kube-controller-manager, kube-scheduler and kubectl.
    """
    return find(CONTROL_PLANE, say)


def helm(say: Say) -> Path:
    """Return the path of helm."""
    return find(HELM, say)["helm"]


def run_helm(kubeconfig: Path, *arguments: str) -> str:
    """Run helm on a cluster and return its output.

    Raises:
        LocalClusterError: When helm fails, with its error output.
    """
    command = [str(helm(lambda _: None)), f"--kubeconfig={kubeconfig}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise LocalClusterError(f"helm {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def find(bundle: Bundle, say: Say) -> dict[str, Path]:
    """Return the paths of all programs of a bundle, keyed by name. Missing programs are downloaded or built.

    Raises:
        LocalClusterError: When a program is not available, with the reason and what to do.
    """
    paths_by_name = {name: path for name, program in bundle.programs.items() if (path := installed(name, program))}
    if len(paths_by_name) < len(bundle.programs):
        folder = cached(bundle, say)
        paths_by_name |= {name: folder / name for name in bundle.programs if name not in paths_by_name}
    return paths_by_name


def ready(bundle: Bundle) -> dict[str, Path]:
    """Return the paths of all programs of a bundle, keyed by name, or an empty mapping if one is missing.

    Nothing is downloaded or built.
    """
    paths_by_name = {name: path for name, program in bundle.programs.items() if (path := installed(name, program))}
    if len(paths_by_name) < len(bundle.programs) and (folder := _target(bundle, _module(bundle))).exists():
        paths_by_name |= {name: folder / name for name in bundle.programs if name not in paths_by_name}
    return paths_by_name if len(paths_by_name) == len(bundle.programs) else {}


def installed(name: str, program: Program) -> Path | None:
    """Return the path of a program in $KUBEBUILDER_ASSETS or on PATH; None if its version is not suitable."""
    folders = [os.environ.get("KUBEBUILDER_ASSETS", ""), os.environ.get("PATH", "")]
    path = shutil.which(name, path=os.pathsep.join(filter(None, folders)))
    if path is None:
        return None
    try:
        finished = subprocess.run(
            [path, *program.version_arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Path(path) if re.search(program.fits, finished.stdout) else None


def version(bundle: Bundle, module: Path) -> str:
    """Return the version, such as "v1.36.3", of the bundle's main dependency that go.mod requires.

    Raises:
        LocalClusterError: When go.mod does not require that dependency.
    """
    required = re.search(rf"\b{re.escape(bundle.version_module)} (v\S+)", (module / "go.mod").read_text())
    if not required:
        raise LocalClusterError(f"{module / 'go.mod'} does not require {bundle.version_module}.")
    return required[1]


def cached(bundle: Bundle, say: Say) -> Path:
    """Return the cache folder with the bundle's programs. If the folder does not exist, create it."""
    module = _module(bundle)
    target = _target(bundle, module)
    if target.exists():
        return target
    lock = target.with_name(f".{target.name}.lock")
    say(f"preparing {bundle.module} {version(bundle, module)}")
    with state.locked(lock):
        if not target.exists():  # another process may have created it during the wait
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
        program_names = ", ".join(bundle.programs)
        raise LocalClusterError(
            f"{program_names} are not on PATH, and {module} is not there to build them: use a source checkout."
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
    for path in folder.iterdir():  # partial downloads
        path.unlink()
    gobuild.build(module, version(bundle, module), folder, say, {bundle.version_module: bundle.files})
    for name, built in bundle.renamed.items():
        (folder / built).rename(folder / name)
