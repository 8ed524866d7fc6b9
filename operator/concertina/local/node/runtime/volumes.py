"""Volumes of a pod, stored as folders below the pod's own folder. The mounts of containers refer to these folders."""

import asyncio
import base64
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concertina.local.host import linux_namespaces
from concertina.local.node.node_client import NodeClient, RequestRefused
from concertina.local.node.runtime import container_environment
from concertina_protocol.quantities import parse_quantity

Object = dict[str, Any]
_SHM_SIZE = 64 * 2**20  # /dev/shm of a pod, as in containerd


class VolumeError(Exception):
    """Error: a volume cannot be set up, or not yet. It is reported as FailedMount, and the message gives the reason."""


@dataclass(frozen=True)
class File:
    """File of a volume whose content comes from a ConfigMap, a Secret, a token or the downward API."""

    data: bytes
    mode: int


@dataclass
class Volumes:
    """Volumes of one pod. prepare() may be called again after it has raised VolumeError."""

    client: NodeClient
    pod: Object
    folder: Path
    allocatable: dict[str, str]
    paths: dict[str, Path] = field(default_factory=dict)
    _memory: list[Path] = field(default_factory=list)
    _tokens: dict[str, tuple[float, str]] = field(default_factory=dict)  # audience: (renew at, token)

    @property
    def shm(self) -> Path:
        """Folder that the pod's containers share as /dev/shm."""
        return self.folder / "shm"

    async def prepare(self) -> None:
        """Create all volumes of the pod."""
        self._make_memory(self.shm, _SHM_SIZE)
        volumes = self.pod["spec"].get("volumes") or []
        await asyncio.gather(*(self._prepare(volume) for volume in volumes))

    async def refresh(self) -> None:
        """Update volumes with changed ConfigMaps and Secrets, and replace tokens that expire soon."""
        for volume in self.pod["spec"].get("volumes") or []:
            if _is_data(volume):
                await self._prepare(volume)

    def is_data(self, name: str) -> bool:
        """Return whether the volume's content comes from the API server, so that it is read-only."""
        volumes = self.pod["spec"].get("volumes") or []
        return any(_is_data(volume) for volume in volumes if volume["name"] == name)

    def remove(self) -> None:
        """Delete all volumes."""
        for mounted in self._memory:
            linux_namespaces.unmount(str(mounted))
        self._memory.clear()
        for name in ("shm", "volumes"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    async def _prepare(self, volume: Object) -> None:
        path = self.folder / "volumes" / volume["name"]
        if "hostPath" in volume:
            self.paths[volume["name"]] = _host_path(volume["hostPath"])
            return
        if _is_data(volume):
            write_files(path, await self._files(volume))
        elif "emptyDir" in volume:
            self._empty(path, volume["emptyDir"] or {})
        else:
            kind = next((key for key in volume if key != "name"), "nothing")
            raise VolumeError(f'volume "{volume["name"]}" is of kind {kind}, which the local cluster does not have')
        self.paths[volume["name"]] = path

    def _empty(self, path: Path, source: Object) -> None:
        if source.get("medium") == "Memory":
            limit = source.get("sizeLimit")
            self._make_memory(path, int(parse_quantity(limit)) if limit else None)
        elif not path.exists():
            path.mkdir(parents=True)
            path.chmod(0o777)

    def _make_memory(self, path: Path, size: int | None) -> None:
        if path in self._memory:
            return
        path.mkdir(parents=True, exist_ok=True)
        linux_namespaces.mount("tmpfs", str(path), "tmpfs", 0, "mode=1777" + (f",size={size}" if size else ""))
        self._memory.append(path)

    async def _files(self, volume: Object) -> dict[str, File]:
        kind = next(key for key in _DATA_KINDS if key in volume)
        source = volume[kind]
        mode = source.get("defaultMode", 0o644)
        if kind != "projected":
            return await self._source_files(kind, source, mode)
        files: dict[str, File] = {}
        for projection in source.get("sources") or []:
            for inner, content in projection.items():
                files |= await self._source_files(inner, content, mode)
        return files

    async def _source_files(self, kind: str, source: Object, mode: int) -> dict[str, File]:
        if kind == "serviceAccountToken":
            token = await self._token(source.get("audience", ""), source.get("expirationSeconds", 3600))
            return {source["path"]: File(token.encode(), mode)}
        if kind == "downwardAPI":
            return {
                item["path"]: File(self._downward(item).encode(), item.get("mode", mode))
                for item in source.get("items") or []
            }
        if kind not in ("configMap", "secret"):
            raise VolumeError(f"a projected source of kind {kind} is not known to the local cluster")
        data = await self._data(kind, source)
        items = source.get("items")
        if items is None:
            return {key: File(value, mode) for key, value in data.items()}
        missing = [item["key"] for item in items if item["key"] not in data]
        if missing and not source.get("optional"):
            raise VolumeError(f"references non-existent {kind} key: {', '.join(missing)}")
        return {item["path"]: File(data[item["key"]], item.get("mode", mode)) for item in items if item["key"] in data}

    async def _data(self, kind: str, source: Object) -> dict[str, bytes]:
        name = str(source.get("name") or source.get("secretName"))
        manifest = await fetch(self.client, self.pod["metadata"]["namespace"], kind, name)
        if manifest is None:
            if source.get("optional"):
                return {}
            raise VolumeError(f'MountVolume.SetUp failed: {kind.lower()} "{name}" not found')
        data = manifest.get("data") or {}
        if kind == "secret":
            return {key: base64.b64decode(value) for key, value in data.items()}
        binary = {key: base64.b64decode(value) for key, value in (manifest.get("binaryData") or {}).items()}
        return {key: value.encode() for key, value in data.items()} | binary

    def _downward(self, item: Object) -> str:
        if "fieldRef" in item:
            return container_environment.field_value(self.pod, item["fieldRef"]["fieldPath"])
        reference = item["resourceFieldRef"]
        containers = self.pod["spec"]["containers"] + (self.pod["spec"].get("initContainers") or [])
        container = next(candidate for candidate in containers if candidate["name"] == reference["containerName"])
        return container_environment.resource_value(reference, container, self.allocatable)

    async def _token(self, audience: str, seconds: int) -> str:
        renew, token = self._tokens.get(audience, (0.0, ""))
        if time.monotonic() < renew:
            return token
        metadata = self.pod["metadata"]
        reference = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
        spec = {"audiences": [audience] if audience else [], "expirationSeconds": seconds, "boundObjectRef": reference}
        account = self.pod["spec"].get("serviceAccountName") or "default"
        path = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{account}/token"
        try:
            answer = await self.client.call("POST", path, {"spec": spec})
        except RequestRefused as error:
            raise VolumeError(f'no token for service account "{account}": {error}') from error
        token = str(answer["status"]["token"])
        self._tokens[audience] = (time.monotonic() + 0.8 * seconds, token)
        return token


_DATA_KINDS = ("configMap", "secret", "projected", "downwardAPI")


def _is_data(volume: Object) -> bool:
    return any(kind in volume for kind in _DATA_KINDS)


async def fetch(client: NodeClient, namespace: str, kind: str, name: str) -> Object | None:
    """Return a ConfigMap or Secret (kind: configMap or secret); None if it does not exist.

    Raises:
        RequestRefused: When the API server refuses the request for another reason.
    """
    try:
        return await client.get(f"/api/v1/namespaces/{namespace}/{kind.lower()}s/{name}")
    except RequestRefused as error:
        if error.status == 404:
            return None
        raise


def _host_path(source: Object) -> Path:
    path, kind = Path(source["path"]), source.get("type") or ""
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate":
        path.touch()
    fits = {"": path.exists, "Directory": path.is_dir, "DirectoryOrCreate": path.is_dir, "File": path.is_file}
    fits |= {
        "FileOrCreate": path.is_file,
        "Socket": path.is_socket,
        "CharDevice": path.is_char_device,
        "BlockDevice": path.is_block_device,
    }
    if not fits[kind]():
        raise VolumeError(f"hostPath {path} is not {'there' if not kind else 'a ' + kind} on this machine")
    return path


def write_files(folder: Path, files: dict[str, File]) -> None:
    """Replace all files of a folder at once, by a change of the link ..data, as the kubelet does."""
    folder.mkdir(parents=True, exist_ok=True)
    current = folder / "..data"
    if current.exists() and _read(current) == files:
        return
    fresh = folder / f"..{time.time_ns()}"
    for name, file in files.items():
        path = fresh / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data)
        path.chmod(file.mode)
    fresh.mkdir(exist_ok=True)
    old = folder / os.readlink(current) if current.is_symlink() else None
    link = folder / "..data_new"
    link.symlink_to(fresh.name)
    link.replace(current)
    tops = {name.split("/")[0] for name in files}
    for stale in (path for path in folder.iterdir() if not path.name.startswith("..") and path.name not in tops):
        stale.unlink()
    for top in tops:
        if not (folder / top).is_symlink():
            (folder / top).symlink_to(f"..data/{top}")
    if old:
        shutil.rmtree(old)


def _read(folder: Path) -> dict[str, File]:
    paths = [path for path in folder.resolve().rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder.resolve())): File(path.read_bytes(), path.stat().st_mode & 0o777) for path in paths
    }
