"""Index of live jobs (not ended or deleted) by the checkpoint folder to which they write.

If several jobs of a namespace use the same folder, the oldest job that has begun owns the folder. For jobs of different
namespaces, an object in the folder itself names the owner, so they are not compared here (decision "Ownership of a
checkpoint folder").
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from concertina.api.spec import JobSpec
from concertina.api.status import ENDED
from concertina.controller.cache.job import CachedJob
from concertina.plan.observed import UriHolder

FILES = "file://"


@dataclass(frozen=True)
class CheckpointFolder:
    """Location of a job's checkpoints.

    Two jobs have equal CheckpointFolder objects if their specs name the same location.
    """

    namespace: str
    uri: str
    secret: str
    volume: str

    @property
    def group(self) -> tuple[str, str]:
        """Key of the folder in the index. Folders with different keys can't be the same location.

        All file URIs of a namespace share one key, because a volume may be mounted at different paths.
        """
        return self.namespace, FILES if self.uri.startswith(FILES) else self.uri


@dataclass(frozen=True)
class FolderUse:
    """Use of a checkpoint folder by one live job."""

    folder: CheckpointFolder
    has_begun: bool
    """True if the operator has begun a round of the job."""
    take_over: str
    """Uid of the job from which this job takes over the folder; empty if it takes over none."""


class UriIndex:
    """Index of the live jobs by checkpoint folder.

    After a change of one job, the index calls `changed(uid)` for each other job that may have become the owner of its
    folder or lost this role.
    """

    def __init__(self, jobs: Mapping[str, CachedJob], changed: Callable[[str], None]) -> None:
        self._jobs = jobs
        self._changed = changed
        self._folders: dict[str, tuple[JobSpec, CheckpointFolder]] = {}
        """Checkpoint folder of each job by uid, with the spec from which the folder was derived.

        The folder is derived again only if the spec changes.
        """
        self._uses: dict[str, FolderUse] = {}
        self._groups: dict[tuple[str, str], set[str]] = {}

    def update(self, uid: str) -> None:
        """Update the index after a change of the job.

        The job's checkpoint folder may have changed, or the job may have started, ended or been deleted.
        """
        before, now = self._uses.pop(uid, None), self._use(uid)
        if now is not None:
            self._uses[uid] = now
        if now == before:
            return
        if before is not None:
            self._groups[before.folder.group].discard(uid)
        if now is not None:
            self._groups.setdefault(now.folder.group, set()).add(uid)
        for folder in {use.folder for use in (before, now) if use is not None}:
            for neighbor in self._others(uid, folder):
                if self._uses[neighbor].folder == folder:
                    self._changed(neighbor)
            if not self._groups[folder.group]:
                del self._groups[folder.group]

    def _use(self, uid: str) -> FolderUse | None:
        job = self._jobs.get(uid)
        if job is None:
            self._folders.pop(uid, None)
            return None
        spec, status = job.view.spec, job.view.status
        if spec is None or spec.checkpoint is None:
            return None
        if any(condition.type in ENDED and condition.status == "True" for condition in status.conditions):
            return None
        if uid not in self._folders or self._folders[uid][0] is not spec:
            self._folders[uid] = spec, folder_of(job.view.namespace, spec)
        begun = status.world.round > 0 or status.world.claim is not None
        return FolderUse(self._folders[uid][1], begun, spec.checkpoint.take_over)

    def holder(self, uid: str) -> UriHolder | None:
        """Return the other job of the namespace that owns the checkpoint folder of this job, or None."""
        use = self._uses.get(uid)
        if use is None:
            return None
        users = [user for user in (uid, *self._others(uid, use.folder)) if self._uses[user].folder == use.folder]
        taken_over = {self._uses[user].take_over for user in users if user == uid or self._uses[user].has_begun}
        begun = [user for user in users if self._uses[user].has_begun and user not in taken_over]
        oldest = min(begun, key=lambda user: (self._jobs[user].view.created, user), default=uid)
        return None if oldest == uid else UriHolder(self._jobs[oldest].name, oldest)

    def sharing(self, uid: str) -> tuple[str, ...]:
        """Return the uids of the other live jobs of this namespace that may write to the same location as this job.

        A job counts even if its spec names a different Secret or volume, because both may lead to the same storage.
        """
        use = self._uses.get(uid)
        return tuple(sorted(self._others(uid, use.folder))) if use else ()

    def _others(self, uid: str, folder: CheckpointFolder) -> Iterable[str]:
        return self._groups.get(folder.group, set()) - {uid}


def folder_of(namespace: str, spec: JobSpec) -> CheckpointFolder:
    """Return the checkpoint folder of a job. The job must have checkpoints."""
    assert spec.checkpoint is not None
    uri = normal(spec.checkpoint.uri)
    volume = _volume(uri.removeprefix(FILES), spec) if uri.startswith(FILES) else ""
    return CheckpointFolder(namespace, uri, spec.checkpoint.secret_name or "", volume)


def normal(uri: str) -> str:
    """Return the URI without redundant slashes, which the storage client ignores."""
    scheme, separator, path = uri.partition("://")
    return scheme + separator + re.sub(r"/+", "/", path).rstrip("/")


def _volume(path: str, spec: JobSpec) -> str:
    """Return the volume that the template mounts at a path in the container `trainer`, as JSON text; empty if none."""
    pod, trainer = spec.template.manifest()["spec"], spec.template.trainer.manifest()
    mount_by_path = {str(mount.get("mountPath")).rstrip("/"): mount for mount in _objects(trainer, "volumeMounts")}
    above = [folder for folder in mount_by_path if path == folder or path.startswith(f"{folder}/")]
    if not above:
        return ""
    mount_path = max(above, key=len)
    mount = mount_by_path[mount_path]
    sources = [volume for volume in _objects(pod, "volumes") if volume.get("name") == mount.get("name")]
    source = [{key: value for key, value in volume.items() if key != "name"} for volume in sources]
    return json.dumps([source, mount_path, mount.get("subPath"), mount.get("subPathExpr")], sort_keys=True)


def _objects(parent: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the objects in the list `parent[name]` of a template. Entries that are not objects are left out."""
    entries = parent.get(name)
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
