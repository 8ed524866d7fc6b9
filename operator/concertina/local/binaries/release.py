"""Download official release binaries, and verify them with their publishers' checksums.

The checksums are downloaded from the publisher over TLS. Pinned checksums would also come from the publisher, and would
have to be updated for each version of four programs on two architectures.
"""

import functools
import hashlib
import http.client
import io
import os
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Say = Callable[[str], None]
_CONNECT_TIMEOUT = 5.0  # seconds without a byte: a machine without internet access should try the next source soon
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Unavailable(Exception):
    """Error that a release can't be downloaded, or that its checksum is wrong. The message names the file."""


@dataclass(frozen=True)
class Asset:
    """File to download. If the file is an archive, `member` is the path of the program in the archive.

    The placeholders {version}, {arch}, {etcd}, {prometheus}, {vale} and {vale_arch} in the fields are replaced.
    """

    program: str
    url: str
    checksum_url: str
    member: str = ""


_KUBERNETES = "https://dl.k8s.io/release/{version}/bin/linux/{arch}/"
_ETCD = "https://github.com/etcd-io/etcd/releases/download/{etcd}/"
_HELM = "https://get.helm.sh/helm-{version}-linux-{arch}.tar.gz"
_PROMETHEUS = "https://github.com/prometheus/prometheus/releases/download/v{prometheus}/"
_PROMETHEUS_FOLDER = "prometheus-{prometheus}.linux-{arch}"
_VALE = "https://github.com/vale-cli/vale/releases/download/v{vale}/vale_{vale}_"
ASSETS: Mapping[str, tuple[Asset, ...]] = {
    "controlplane": (
        *(
            Asset(name, _KUBERNETES + name, f"{_KUBERNETES}{name}.sha256")
            for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
        ),
        Asset("etcd", _ETCD + "etcd-{etcd}-linux-{arch}.tar.gz", _ETCD + "SHA256SUMS", "etcd-{etcd}-linux-{arch}/etcd"),
    ),
    "kubernetes-1.37": tuple(
        Asset(name, _KUBERNETES + name, f"{_KUBERNETES}{name}.sha256")
        for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
    ),
    "helm": (Asset("helm", _HELM, _HELM + ".sha256sum", "linux-{arch}/helm"),),
    "prometheus": tuple(
        Asset(
            name,
            f"{_PROMETHEUS}{_PROMETHEUS_FOLDER}.tar.gz",
            f"{_PROMETHEUS}sha256sums.txt",
            f"{_PROMETHEUS_FOLDER}/{name}",
        )
        for name in ("prometheus", "promtool")
    ),
    "vale": (Asset("vale", _VALE + "Linux_{vale_arch}.tar.gz", _VALE + "checksums.txt", "vale"),),
}


def download(
    bundle: str,
    version: str,
    required: Mapping[str, str],
    folder: Path,
    say: Say,
    assets: Mapping[str, tuple[Asset, ...]] = ASSETS,
) -> None:
    """Download the programs of a bundle into a folder.

    Args:
        bundle: Name of the bundle.
        version: Version of the bundle.
        required: Versions in go.mod, keyed by module path.
        folder: Folder for the programs.
        say: Function that shows progress.
        assets: Files to download, keyed by bundle.

    Raises:
        Unavailable: When a file can't be downloaded, or its checksum is wrong.
    """
    if bundle not in assets:
        raise Unavailable(f"{bundle} is released without binaries")
    architecture = _ARCHITECTURES.get(os.uname().machine, os.uname().machine)
    names = {
        "version": version,
        "arch": architecture,
        "etcd": required.get("go.etcd.io/etcd/server/v3", ""),
        "prometheus": prometheus(required.get("github.com/prometheus/prometheus", "")),
        "vale": required.get("github.com/vale-cli/vale/v3", "").removeprefix("v"),
        "vale_arch": "64-bit" if architecture == "amd64" else architecture,
    }
    fetch = functools.lru_cache(maxsize=2)(functools.partial(_fetch, say=say))  # one archive may hold two programs
    for asset in assets[bundle]:
        url = asset.url.format(**names)
        expected = _checksum(fetch(asset.checksum_url.format(**names)).decode(), url.rpartition("/")[2])
        data = fetch(url)
        actual = hashlib.sha256(data).hexdigest()
        if actual != expected:
            raise Unavailable(f"{url} is damaged: its SHA-256 is {actual}, its publisher says {expected}")
        path = folder / asset.program
        path.write_bytes(_member(data, asset.member.format(**names)) if asset.member else data)
        path.chmod(0o755)


def prometheus(module: str) -> str:
    """Return the Prometheus version that belongs to a version of its Go module, such as 3.5.2 for v0.305.2.

    An empty version gives an empty result.
    """
    if not module:
        return ""
    _, middle, patch = module.split(".")
    major, minor = divmod(int(middle), 100)
    return f"{major}.{minor}.{patch}"


def _checksum(text: str, name: str) -> str:
    """Return the checksum of the file `name` from the text of the publisher's checksum file.

    The text is either a single checksum, or a list of checksums with file names.

    Raises:
        Unavailable: When the text has no checksum for the file.
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    for fields in lines:
        if len(fields) == 1 or fields[-1].lstrip("*") == name:
            return fields[0]
    raise Unavailable(f"its publisher gives no checksum for {name}")


def _fetch(url: str, say: Say) -> bytes:
    """Download a URL and return the content.

    Raises:
        Unavailable: When the download fails.
    """
    say(f"downloading {url}")
    chunks = []
    try:
        with urllib.request.urlopen(url, timeout=_CONNECT_TIMEOUT) as response:
            length, done = int(response.headers.get("Content-Length") or 0), 0
            while chunk := response.read(1 << 20):
                chunks.append(chunk)
                done += len(chunk)
                say(f"downloading {url}: {done >> 20} of {length >> 20} MB")
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise Unavailable(f"{url} cannot be had ({getattr(error, 'reason', error)})") from error
    return b"".join(chunks)


def _member(archive: bytes, name: str) -> bytes:
    """Return the content of a file in an archive.

    Raises:
        Unavailable: When the archive has no such file.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            file = tar.extractfile(name)
            if file:
                return file.read()
    except (tarfile.TarError, KeyError) as error:
        raise Unavailable(f"the archive has no {name} ({error})") from error
    raise Unavailable(f"the archive has no file {name}")
