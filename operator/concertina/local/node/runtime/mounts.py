"""Files and folders of this machine that are mounted into a container."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from concertina.local.host import paths
from concertina.local.node.runtime import container_environment, rootfs
from concertina.local.node.runtime.volumes import Volumes

Object = dict[str, Any]


def write_hosts(folder: Path, pod: Object, address: str) -> Path:
    """Write the pod's /etc/hosts and return its path. The pod's host name must resolve to the pod's address."""
    lines = ["# Kubernetes-managed hosts file.", "127.0.0.1\tlocalhost", "::1\tlocalhost ip6-localhost ip6-loopback"]
    lines.append(f"{address}\t{hostname(pod)}")
    for alias in pod["spec"].get("hostAliases") or []:
        lines.append(alias["ip"] + "\t" + "\t".join(alias.get("hostnames") or []))
    path = folder / "hosts"
    path.write_text("\n".join(lines) + "\n")
    return path


def hostname(pod: Object) -> str:
    """Return the host name inside the pod."""
    return str(pod["spec"].get("hostname") or pod["metadata"]["name"])[:63]


def of_container(spec: Object, volumes: Volumes, hosts: Path, variables: dict[str, str]) -> list[rootfs.Mount]:
    """Return the mounts of a container: its volumeMounts, /etc/hosts and /dev/shm."""
    mounts = [rootfs.Mount(str(hosts), "/etc/hosts")]
    targets = {"/etc/hosts"}
    for mount in spec.get("volumeMounts") or []:
        target = mount["mountPath"].rstrip("/") or "/"
        source = volumes.paths[mount["name"]]
        inner = mount.get("subPath") or container_environment.expand(mount.get("subPathExpr") or "", variables)
        if inner:
            source = _below(source, inner)
        mounts.append(rootfs.Mount(str(source), target, bool(mount.get("readOnly")) or volumes.is_data(mount["name"])))
        targets.add(target)
    if "/dev/shm" not in targets:
        mounts.append(rootfs.Mount(str(volumes.shm), "/dev/shm"))
    return mounts


def of_image(folder: str, covering: Sequence[rootfs.Mount]) -> list[rootfs.Mount]:
    """Return the mounts that keep an image's virtual environment visible if a volume would cover it.

    The mounts are for the virtual environment, for the Python from which it was created, and for the checkout to which
    it links. For example, an emptyDir at /tmp would cover a checkout below /tmp.
    """
    visible_paths = {os.path.realpath(path) for path in (folder, sys.base_prefix, paths.checkout())}
    targets = [mount.target.rstrip("/") for mount in covering]
    return [
        rootfs.Mount(path, path) for path in sorted(visible_paths) if any(path.startswith(f"{t}/") for t in targets)
    ]


def _below(source: Path, inner: str) -> Path:
    """Return the path of the subPath `inner` in the volume `source`. If the path does not exist, create a folder.

    Raises:
        ConfigError: When the subPath points outside of its volume.
    """
    path = source / inner
    if ".." in Path(inner).parts or Path(inner).is_absolute():
        raise container_environment.ConfigError(f"subPath {inner} points outside its volume")
    if not path.exists():
        path.mkdir(parents=True)
        path.chmod(0o777)
    return path
